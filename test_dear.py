"""Exact checks: against open_clip, against dense oracles, against values worked out by hand. No network.

    python -m pytest test_dear.py
"""
import csv
import fcntl
import io
import json
import math
import random
import statistics
from functools import partial
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import scipy.io
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from safetensors.torch import save_file

import bench
import data
import dear
import roles
import shapes
import train

# Tiny models in the proportions of ViT-B/16 and ViT-L/14: patch grid, depth of either tower, head width.
TINY = {
    "B-16": dict(embed_dim=24, vision_cfg=dict(image_size=64, patch_size=16, layers=12, width=48, head_width=16),
                 text_cfg=dict(context_length=20, vocab_size=49408, width=32, heads=4, layers=12)),
    "L-14": dict(embed_dim=40, vision_cfg=dict(image_size=42, patch_size=14, layers=24, width=64, head_width=16),
                 text_cfg=dict(context_length=20, vocab_size=49408, width=48, heads=4, layers=12)),
}
TEXTS = ["a photo of a cat.", "banded texture.", "a photo of a striped blue boat in the snow."]


def tiny(folder, shape="B-16", quick_gelu=False):
    """open_clip's own model with random weights, and ours loaded from its files."""
    torch.manual_seed(0)
    theirs = open_clip.CLIP(**TINY[shape], quick_gelu=quick_gelu).eval()
    for parameter in theirs.parameters():                  # biases and norms too: what is zero or one hides mistakes
        torch.nn.init.normal_(parameter, mean=0.02, std=0.15) if parameter.ndim else parameter.data.fill_(3.)
    folder.mkdir(exist_ok=True)
    save_file(theirs.state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": {**TINY[shape], "quick_gelu": quick_gelu}}))
    return theirs.requires_grad_(False), dear.load_clip(folder)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def routed(clip):
    """A role map in which every role occurs in every layer."""
    rows = [dear.role_row(role, dear.ATTRIBUTES) for role in ("color", "mixed", "generalization")]
    return dear.Roles(dear.ATTRIBUTES, torch.tensor([rows] * 4)[:, torch.arange(clip.heads) % 3], "test")


def model_with(clip, roles, **options):
    """A DeAR whose tokens are large enough to matter."""
    model = dear.DeAR(clip, roles, generator=torch.Generator().manual_seed(2), **options)
    with torch.no_grad():
        model.attr_tokens.mul_(50), model.text_tokens.mul_(50)
        model.attr_proj.add_(0.1)
    return model


# ------------------------------------------------------------------------------------------------------------- towers

@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("shape", TINY)
def test_towers_equal_open_clip(tmp_path, shape, quick_gelu):
    theirs, ours = tiny(tmp_path, shape, quick_gelu)
    size = TINY[shape]["vision_cfg"]["image_size"]
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    assert ours.quick_gelu == quick_gelu
    torch.testing.assert_close(ours.encode_image(images), theirs.encode_image(images), atol=1e-5, rtol=1e-5)
    full = open_clip.SimpleTokenizer(context_length=20)(TEXTS)
    trimmed = dear.tokenize(ours, TEXTS).ids
    assert trimmed.shape[1] < full.shape[1]
    for ids in (full, trimmed):
        torch.testing.assert_close(ours.encode_text(ids), theirs.encode_text(full), atol=1e-5, rtol=1e-5)


def test_prefix_and_suffix_equal_the_unsplit_forward(clips, images):
    _, clip = clips
    model = dear.DeAR(clip, dear.uniform_roles("mixed", clip))
    tokens = dear.tokenize(clip, TEXTS)
    torch.testing.assert_close(model.frozen_image(images)[1], F.normalize(clip.encode_image(images), dim=-1))
    torch.testing.assert_close(model.frozen_text(model.prompts(tokens)),
                               F.normalize(clip.encode_text(tokens.ids), dim=-1))


def test_activation_comes_from_the_tag(tmp_path, monkeypatch):
    theirs, _ = tiny(tmp_path)
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: dict(TINY["B-16"]))    # the tags stay open_clip's
    monkeypatch.setattr(open_clip, "download_pretrained", lambda tag: tmp_path / "open_clip_model.safetensors")
    for tag, quick_gelu in {"openai": True, "dfn2b": True, "metaclip_400m": True, "laion2b_s34b_b88k": False}.items():
        assert dear.load_clip("ViT-B-16", tag).quick_gelu is quick_gelu
    assert dear.load_clip("ViT-B-16", "openai", quick_gelu=False).quick_gelu is False
    assert dear.load_clip("ViT-B-16", str(tmp_path / "open_clip_model.safetensors"), quick_gelu=True).quick_gelu is True
    assert dear.load_clip("ViT-L-14", "laion2b_s32b_b82k").mean == (0.5, 0.5, 0.5)         # not OpenAI's statistics
    assert dear.load_clip("ViT-L-14", "laion2b_s32b_b82k").std == (0.5, 0.5, 0.5)
    assert dear.load_clip("ViT-H-14", "dfn5b").squash and not dear.load_clip("ViT-B-16", "openai").squash


def test_a_configuration_that_is_no_clip_is_refused(tmp_path):
    _, clip = tiny(tmp_path)
    file, state = tmp_path / "open_clip_config.json", clip.state_dict()
    good = TINY["B-16"]
    vision, text = good["vision_cfg"], good["text_cfg"]
    for config in ([], {}, {**good, "vision_cfg": None}, {**good, "embed_dim": "24"}, {**good, "quick_gelu": "false"},
                   *[{**good, "vision_cfg": {**vision, **wrong}} for wrong in (
                       {"layers": 4}, {"layers": "12"}, {"layers": [3, 4]}, {"head_width": 0}, {"patch_size": 0},
                       {"head_width": 5}, {"width": -48}, {"pool_type": "avg"}, {"image_size": 48})],
                   *[{**good, "text_cfg": {**text, **wrong}} for wrong in ({"layers": 4}, {"vocab_size": 9})]):
        file.write_text(json.dumps({"model_cfg": config}))
        with pytest.raises(dear.InputError):
            dear.load_clip(tmp_path)
    prints = set()
    for preprocess in ({}, {"mean": [0.5] * 3}, {"resize_mode": "squash"}):
        file.write_text(json.dumps({"model_cfg": good, "preprocess_cfg": preprocess}))
        prints.add(dear.load_clip(tmp_path).fingerprint)
    for preprocess in ({"mean": [0.5]}, {"resize_mode": "longest"}, {"interpolation": "nearest"}, [1]):
        file.write_text(json.dumps({"model_cfg": good, "preprocess_cfg": preprocess}))
        with pytest.raises(dear.InputError):
            dear.load_clip(tmp_path)
    file.write_text(json.dumps({"model_cfg": good}))
    for value in (1., torch.nan):
        state["visual.conv1.weight"][0, 0, 0, 0] = value
        save_file(state, tmp_path / "open_clip_model.safetensors")
        if value == value:
            prints.add(dear.load_clip(tmp_path).fingerprint)
    assert len(prints) == 4
    with pytest.raises(dear.InputError, match="conv1.weight holds values that are no finite"):
        dear.load_clip(tmp_path)


def test_a_prompt_may_fill_the_context_and_no_more(clips):
    _, clip = clips                                        # 20 tokens: BOT, EOT and 18 words
    assert dear.tokenize(clip, ["a " * 18]).ids.shape == (1, 20)
    with pytest.raises(dear.InputError, match="longer than this text tower reads"):
        dear.tokenize(clip, ["a " * 19])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_every_kind_of_weights_file(tmp_path, monkeypatch, images):
    theirs, ours = tiny(tmp_path)
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: dict(TINY["B-16"]))
    state, expected = theirs.state_dict(), ours.encode_image(images)
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "training.bin")
    save_file(state, tmp_path / "weights.safetensors")
    for name in ("plain.pt", "training.bin", "weights.safetensors"):
        torch.testing.assert_close(dear.load_clip("ViT-B-16", tmp_path / name).encode_image(images), expected)

    archive = torch.nn.Module()                            # OpenAI's archive: half weights, three extra buffers, code
    for key, value in {**state, "input_resolution": torch.tensor(64), "context_length": torch.tensor(20),
                       "vocab_size": torch.tensor(49408)}.items():
        *path, leaf = key.split(".")
        module = archive
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_buffer(leaf, value.half() if value.is_floating_point() else value)
    torch.jit.script(archive).save(tmp_path / "ViT-B-16.pt")
    loaded = dear.load_clip("ViT-B-16", tmp_path / "ViT-B-16.pt")
    assert loaded.quick_gelu is True and loaded.logit_scale.dtype == torch.float32
    torch.testing.assert_close(loaded.visual.proj, state["visual.proj"], atol=1e-3, rtol=1e-3)


def test_demo_checkpoint_is_open_clips():
    theirs, ours = open_clip.create_model(f"local-dir:{dear.DEMO}").eval(), dear.load_clip("demo")
    images = shapes.normalize(shapes.render(torch.zeros(2, 5, dtype=torch.long), torch.Generator().manual_seed(0)))
    with torch.no_grad():
        torch.testing.assert_close(ours.encode_image(images), theirs.encode_image(images), atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- the role mask

def test_role_mask_truth_table():
    """Two originals, two attribute tokens a and b; rows are queries, columns keys, as the rule says by hand."""
    expected = {"mixed": ["1111", "1111", "1111", "1111"],
                "a": ["1110", "1110", "1110", "0001"],
                "b": ["1101", "1101", "0010", "1101"],
                "generalization": ["1100", "1100", "0011", "0011"]}
    visible = torch.tensor([dear.role_row(role, ("a", "b")) for role in expected])
    attend = dear.role_attention(visible, tokens=2, flex=False)
    by_hand = [[[digit == "1" for digit in row] for row in rows] for rows in expected.values()]
    assert attend.keywords["attn_mask"][0].tolist() == by_hand
    shown = torch.cat([torch.ones(4, 2, dtype=torch.bool), visible], dim=1)
    assert torch.equal(attend.keywords["attn_mask"][0], shown[:, :, None] == shown[:, None, :])


def test_flex_attention_equals_the_dense_mask():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 21, 16, generator=generator)
    visible = torch.tensor([dear.role_row(r, "abcde") for r in ("mixed", "generalization", "a", "c", "e", "mixed")])
    dense, flex = (dear.role_attention(visible, tokens=16, flex=flex)(q, k, v) for flex in (False, True))
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


def test_all_generalization_leaves_the_class_feature_frozen(clips, images):
    _, clip = clips
    model = model_with(clip, dear.uniform_roles("generalization", clip))
    f_cls, f_attr, _, f_cls0 = model(images, model.prompts(dear.tokenize(clip, TEXTS)))
    torch.testing.assert_close(f_cls0, F.normalize(clip.encode_image(images), dim=-1))
    torch.testing.assert_close(f_cls, f_cls0)
    assert not f_cls.requires_grad                         # no attribute token reaches it
    assert torch.autograd.grad(f_attr[0, 0, 0], model.attr_tokens)[0].abs().max() > 0


def test_all_mixed_is_plain_insertion(clips, images):
    """The oracle runs open_clip's own layers, without a mask, and inserts by index."""
    theirs, clip = clips
    model = model_with(clip, dear.uniform_roles("mixed", clip), beta=0.6)
    tokens = dear.tokenize(clip, TEXTS)
    with torch.no_grad():
        f_cls, f_attr, f_text, _ = model(images, model.prompts(tokens))

        x = clip.visual.embed(images)
        for l, block in enumerate(theirs.visual.transformer.resblocks, 1):
            if l == 9:
                x = torch.cat([x, model.attr_tokens.expand(3, -1, -1)], dim=1)
            elif l > 9:
                x[:, 17:] = 0.6 * model.attr_tokens + 0.4 * x[:, 17:]
            x = block(x)
        torch.testing.assert_close(f_cls, F.normalize(theirs.visual.ln_post(x[:, 0]) @ theirs.visual.proj, dim=-1))
        torch.testing.assert_close(f_attr, F.normalize(theirs.visual.ln_post(x[:, 17:]) @ model.attr_proj, dim=-1))

        x = clip.text_embed(tokens.ids)
        for l, block in enumerate(theirs.transformer.resblocks, 1):
            if l == 9:
                x = torch.cat([x[:, :1], model.text_tokens.expand(3, -1, -1), x[:, 1:]], dim=1)
            elif l > 9:
                x[:, 1:6] = 0.6 * model.text_tokens + 0.4 * x[:, 1:6]
            x = block(x, attn_mask=torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1))
        x = theirs.ln_final(torch.stack([x[c, int(tokens.eot[c]) + 5] for c in range(3)])) @ theirs.text_projection
        torch.testing.assert_close(f_text, F.normalize(x, dim=-1))


def test_a_routed_head_sees_its_own_attribute_only():
    """What original tokens receive in a head of attribute a does not change with any other attribute's token."""
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    visible = torch.tensor([dear.role_row(role, "abc") for role in ("a", "generalization")])
    attend = dear.role_attention(visible, tokens=5, flex=False)
    before = attend(q, k, v)[:, :, :5]
    for changed, same in ((5, [False, True]), (6, [True, True]), (7, [True, True])):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, changed] += 1
        v2[:, :, changed] += 1
        after = attend(q, k2, v2)[:, :, :5]
        assert [torch.equal(before[:, h], after[:, h]) for h in (0, 1)] == same


def test_role_files(tmp_path, clips):
    _, clip = clips
    heads = {f"L{l} H{h}": {"role": "mixed"} for l in (9, 10, 11, 12) for h in range(3)}
    heads["L9 H0"] = {"role": "attribute", "attribute": "hue"}
    heads["L12 H2"] = {"role": "expert"}

    def read(**changes):
        (tmp_path / "roles.json").write_text(json.dumps({"attributes": ["size", "hue"], "map": heads, **changes}))
        return dear.read_roles(tmp_path / "roles.json", clip)
    visible = read().visible
    assert visible[0, 0].tolist() == [False, True] and visible[0, 1].tolist() == [True, True]
    assert visible[3, 2].tolist() == [False, False] and visible.shape == (4, 3, 2)
    for changes, message in [
            (dict(map={k: v for k, v in heads.items() if k != "L10 H1"}), "no role for L10 H1"),
            (dict(map={**heads, "L8 H0": {"role": "mixed"}}), "a role for L8 H0"),
            (dict(map={**heads, "L11 H1": {"role": "boss"}}), "L11 H1: unknown role 'boss'"),
            (dict(map={**heads, "L11 H1": {"role": "attribute", "attribute": "age"}}), "L11 H1: attribute 'age'"),
            (dict(map={k: {"role": "expert"} for k in heads}), "no head may see attribute 'size'"),
            (dict(attributes="size"), "a list of different names"), (dict(attributes=["size", "size"]), "a list of"),
            (dict(map=["L9 H0"]), "not a JSON role map")]:
        with pytest.raises(dear.InputError, match=message):
            read(**changes)


# -------------------------------------------------------------------------------------------------------------- roles

def test_contributions_sum_to_the_feature(clips, images):
    _, clip = clips
    added, rows = [], {}                                   # CLS rows of every MLP, and of what enters layer 1
    hooks = [block.mlp.register_forward_hook(lambda module, args, out: added.append(out[:, 0]))
             for block in clip.visual.transformer.resblocks]
    hooks += [clip.visual.ln_pre.register_forward_hook(lambda module, args, out: added.append(out[:, 0])),
              clip.visual.ln_post.register_forward_hook(lambda module, args, out: rows.update(last=args[0]))]
    feature = F.normalize(clip.encode_image(images), dim=-1)
    others = roles.to_feature(clip, torch.stack(added, dim=1), rows["last"], parts=2 * 12 + 1)
    for hook in hooks:
        hook.remove()
    heads = roles.contributions(clip, images, layers=12)
    assert heads.shape == (3, 12, 3, 24) and others.shape == (3, 13, 24)
    torch.testing.assert_close(heads.sum(dim=(1, 2)) + others.sum(dim=1), feature, atol=1e-5, rtol=0)
    torch.testing.assert_close(roles.contributions(clip, images), heads[:, -4:])


def textspan_loop(c, pool, picks, rank):
    """TEXTSPAN as published, on every image's contributions. c: `[n, E]`, pool: `[M, E]`."""
    span = torch.linalg.svd(c, full_matrices=False).Vh[:rank]
    texts, left, found = pool @ span.T @ span, c - c.mean(dim=0), []
    for _ in range(picks):
        found.append((left @ texts.T).std(dim=0).argmax().item())
        u = texts[found[-1]] / texts[found[-1]].norm()
        left, texts = left - torch.outer(left @ u, u), texts - torch.outer(texts @ u, u)
    return found


def test_textspan_equals_the_image_by_text_loop():
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(50, 6, generator=generator).double() @ torch.randn(6, 12, generator=generator).double() + 1
    pool, moments = F.normalize(torch.randn(40, 12, generator=generator).double(), dim=1), (c.mean(dim=0), c.T @ c / 50)
    for picks, rank in ((5, 6), (3, 3)):
        assert roles.textspan(*moments, pool, picks, rank) == textspan_loop(c, pool, picks, rank)
    assert len(roles.textspan(*moments, pool, 20, 6)) == 6                                 # then nothing is left
    assert roles.textspan(*moments, torch.cat([pool, pool]), 5, 6) == textspan_loop(c, pool, 5, 6)     # ties: the first


def test_moments_do_not_depend_on_the_batch_size(clips):
    _, clip = clips
    items = [data.Item(Image.fromarray(image), 0) for image, *_ in shapes.task(train=1, test=1)[1][:5]]
    c = roles.contributions(clip, torch.stack([image for image, _ in data.Images(items, data.transform(clip, False))]))
    for batch_size in (2, 5):
        first, second = roles.moments(clip, items, batch_size, "cpu")
        torch.testing.assert_close(first, c.double().mean(dim=0), atol=1e-6, rtol=0)
        torch.testing.assert_close(second, torch.einsum("blhe,blhf->lhef", c, c).double() / 5, atol=1e-6, rtol=0)


def by_letter(texts):
    """Stands for SBERT: texts at angles by their first letter, with a little of their length to tell them apart."""
    angles = torch.tensor([{"a": 0, "b": 60}.get(text[0], 170) for text in texts]).deg2rad()
    return torch.stack([angles.cos(), angles.sin(), 0.01 * torch.tensor([len(text) for text in texts])], dim=1)


def test_concepts_entropy_and_roles_by_hand():
    concepts = {"first": ("a",), "second": ("b",), "third": ("c",)}
    texts = ["a" * n for n in range(1, 6)] + ["b" * n for n in range(1, 6)] + ["c"]
    found = roles.concepts_of(texts, by_letter, concepts)
    assert found.pop("c") == "second"                      # noise goes to the nearest cluster
    assert found == {text: {"a": "first", "b": "second"}[text[0]] for text in texts[:-1]}
    found["c"] = "second"
    assert roles.concepts_of(texts[::-1] * 2, by_letter, concepts) == found
    assert roles.concepts_of(["b"], by_letter, concepts) == {"b": "second"}
    assert roles.concepts_of(["b"] * 30, by_letter, concepts) == {"b": "second"}
    assert roles.concepts_of([], by_letter, concepts) == {}
    assert set(roles.concepts_of(texts[:5], by_letter, concepts).values()) == {"first"}
    assert roles.concept_entropy(["a"] * 7) == 0 and roles.concept_entropy([]) == 0
    assert roles.concept_entropy(list("aabc")) == pytest.approx(1.5)
    for found, role in [("aaaa", {"role": "attribute", "attribute": "a"}), ("bbbb", {"role": "expert"}),
                        ("aaab", {"role": "attribute", "attribute": "a"}), ("baab", {"role": "expert"}),
                        ("aabc", {"role": "mixed"}), ("abcd", {"role": "generalization"}),
                        ("", {"role": "generalization"})]:
        assert roles.role_of(list(found), ["a"], low=1.0, high=2.0) == role
    assert roles.role_of(list("aabbc"), ["a"]) == {"role": "generalization"}               # 1.52 bits


def test_table_1_gives_the_papers_five_heads():
    """The paper's Table 1 through the real SBERT: each head's five phrases, clustered together."""
    heads = {
        "object": ["A stick", "A cup", "A bonnet", "A trampoline", "A shoelace"],
        "shape": ["A regular octagon", "Rectangular object", "A wavy pattern", "Herringbone pattern",
                  "A scalene triangle"],
        "texture": ["Delicate embroidery", "Intricate architectural carving", "Artwork with kaleidoscopic patterns",
                    "Image with woven basket textures", "Artwork with Mondrian-like grids"],
        "color": ["An image with cold green tones", "Image with a red color", "A charcoal gray color",
                  "Image with a yellow color", "Image with a blue color"],
        "location": ["Picture taken in Scotland", "Photo taken in Barcelona", "Photo taken in Tokyo, Japan",
                     "Image taken in South Africa", "Picture taken in Texas, USA"]}
    named = roles.concepts_of([text for texts in heads.values() for text in texts], roles.load_sbert())
    for attribute, texts in heads.items():
        found = [named[text] for text in texts]
        assert roles.role_of(found, dear.ATTRIBUTES) == {"role": "attribute", "attribute": attribute}
        assert roles.concept_entropy(found) <= roles.LOW


def test_a_role_map_is_what_its_literal_computation_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roles, "load_sbert", lambda name: by_letter)
    pool = ["a boat", "A  boat", "# no text", "", "a striped thing", "blue", "boats", "a house", "a green color", "cups",
            "crosses", "a dotted pattern", "a white star", "a red thing", "color", "building", "cars", "big circle"]
    (tmp_path / "pool.txt").write_text("\n".join(pool))
    flags = (f"--images 40 --seed 5 --texts 4 --rank 9 --low 0.9 --high 1.9 --descriptions {tmp_path / 'pool.txt'} "
             "--attributes b").split()

    def compute(name, *more):
        roles.main([*flags, "--output", str(tmp_path / name), *more])
        return (tmp_path / name).read_text()
    text = compute("v1.0.json")
    assert compute("b.json") == text and compute("c.json", "--batch-size", "7") == text
    clip, file = dear.load_clip("demo"), json.loads(text)
    texts = [text for text in pool if text not in ("A  boat", "# no text", "")]            # "A  boat" reads as "a boat"
    features = F.normalize(clip.encode_text(dear.tokenize(clip, texts).ids), dim=1).double()
    items = random.Random(5).sample(data.load("shapes")[0].train, 40)
    c = roles.contributions(clip, torch.stack([data.transform(clip, train=False)(item.image) for item in items])).double()
    assert list(file["map"]) == [f"L{l} H{h}" for l in (5, 6, 7, 8) for h in range(8)]
    picked = [[texts[k] for k in textspan_loop(c[:, l, h], features, 4, 9)] for l in range(4) for h in range(8)]
    named = roles.concepts_of(sum(picked, []), by_letter, {"b": ("b",), **roles.CONCEPTS})
    for head, expected in zip(file["map"].values(), picked):
        found = [named[text] for text in expected]
        assert head["texts"] == expected and head["distribution"] == {concept: found.count(concept) for concept in found}
        assert head["entropy"] == pytest.approx(roles.concept_entropy(found), abs=1e-3)
        assert {**head, **roles.role_of(found, ["b"], 0.9, 1.9)} == head
    assert Image.open(tmp_path / "v1.0.png").size[0] > 8 * 50 and "L8 H7" in (tmp_path / "v1.0.md").read_text()
    assert file["fingerprint"] == clip.fingerprint

    file["map"]["L5 H0"] = {"role": "mixed"}               # a person edits a role
    (tmp_path / "b.json").write_text(json.dumps(file))
    assert dear.read_roles(tmp_path / "b.json", clip).visible[0, 0].all()
    clip.fingerprint = "other"
    with pytest.raises(dear.InputError, match="other weights"):
        dear.read_roles(tmp_path / "b.json", clip)

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "one").mkdir()
    picture(tmp_path / "one" / "1.png")
    for more, message in [(["--attributes", "color", "color"], "different names"), (["--attributes", "mixed"], "none of"),
                          (["--output", tmp_path / "x.png"], "ends in .json"), (["--dataset", tmp_path / "one"], "differ"),
                          (["--dataset", tmp_path / "no"], "no folder"), (["--low", 2], "must be below"),
                          (["--low", 0, "--high", 0.01], "no head may see b, so no map is written"),
                          (["--model", "a" * 300], "neither a folder nor a configuration"),
                          (["--descriptions", tmp_path / "one"], "Is a directory")]:
        with pytest.raises(SystemExit) as stopped:
            roles.main([*flags, "--output", str(tmp_path / "b.json"), *map(str, more)])
        assert stopped.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(roles.os, "replace", lambda *paths: 1 / 0)                         # cut off before the move
    with pytest.raises(ZeroDivisionError):
        compute("b.json")
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_bundled_role_maps(capsys, monkeypatch):
    clip = dear.load_clip("demo")
    assert dear.read_roles(roles.map_path(clip), clip).visible.shape == (4, 8, 5)
    assert json.loads(roles.map_path(clip).read_text())["fingerprint"] == clip.fingerprint
    vit = SimpleNamespace(layers=12, heads=12, name="ViT-B-16", fingerprint="any", pretrained="tag", folder=None)
    args = SimpleNamespace(roles=None, quick_gelu=None, ablate=None)
    visible = train.choose_roles(args, vit).visible        # (layer - 9, head, attribute)
    assert "python roles.py --model ViT-B-16 --pretrained tag" in capsys.readouterr().out
    with pytest.raises(data.InputError, match="no role map for ViT-L-14 --pretrained tag: python roles.py"):
        train.choose_roles(args, SimpleNamespace(**{**vars(vit), "name": "ViT-L-14", "layers": 24}))
    assert visible.nonzero().tolist() == [[2, 5, 2], [3, 0, 4], [3, 5, 1], [3, 7, 3], [3, 10, 0]]
    texts, _ = roles.read_pool(vit, None)
    assert len(texts) >= 600 and len({text.lower() for text in texts}) == len(texts)
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: io.BytesIO(b"a text"))
    with pytest.raises(data.InputError, match="is not the file it was"):
        roles.read_pool(vit, "textspan")


# ------------------------------------------------------------------------------------------- losses, fusion, training

def test_losses_and_fusion_by_hand():
    f_cls, f_attr = torch.tensor([[1., 0.]]), torch.tensor([[[0., 1.], [0.6, 0.8]]])
    f_text, alpha = torch.tensor([[1., 0.], [0., 1.]]), torch.tensor([0.5, 0.3, 0.2])
    logits = dear.fuse(f_cls, f_attr, f_text, alpha, torch.tensor(10.))
    torch.testing.assert_close(logits, torch.tensor([[10 * (0.5 + 0.2 * 0.6), 10 * (0.3 + 0.2 * 0.8)]]))
    assert dear.ce_loss(logits, torch.tensor([1])).item() == pytest.approx(math.log(1 + math.exp(6.2 - 4.6)))
    assert dear.reg_loss(f_cls, torch.tensor([[0.6, 0.8]]), f_text, torch.tensor([[1., 0.], [0.8, 0.6]])).item() == \
        pytest.approx((1 - 0.6) + (0 + (1 - 0.6)) / 2)
    assert dear.fusion_loss(alpha).item() == pytest.approx(-math.log(0.5))


def test_exactly_four_tensors_are_trained(clips, images):
    _, clip = clips
    model = dear.DeAR(clip, routed(clip))
    assert {name: tuple(t.shape) for name, t in model.trained().items()} == {
        "attr_tokens": (5, 48), "text_tokens": (5, 32), "attr_proj": (48, 24), "w": (6,)}
    assert torch.equal(model.attr_proj, clip.visual.proj)
    torch.testing.assert_close(model.alpha, torch.tensor([0.7] + [0.06] * 5))
    f_cls, f_attr, f_text, _ = model(images, model.prompts(dear.tokenize(clip, TEXTS)))
    logits = dear.fuse(f_cls, f_attr, f_text, model.alpha, clip.tau)
    dear.ce_loss(logits, torch.tensor([0, 1, 2])).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0} \
        == {"attr_tokens", "text_tokens", "attr_proj", "w"}


def role_map(clip, layers):
    """Layer by layer: the role of all heads, or "routed" for a mix of every role."""
    maps = [routed(clip) if role == "routed" else dear.uniform_roles(role, clip) for role in layers]
    return dear.Roles(dear.ATTRIBUTES, torch.stack([one.visible[l] for l, one in enumerate(maps)]), "test")


@pytest.mark.parametrize("layers", [["routed"] * 4, ["mixed"] * 4, ["generalization", "generalization", "routed", "mixed"],
                                    ["routed", "generalization", "mixed", "generalization"]])
def test_a_step_equals_the_plain_one(clips, images, layers):
    """Nothing that is shared, kept or left out changes the loss or a gradient (bench.plain_features leaves out nothing)."""
    _, clip = clips
    model, args = model_with(clip, role_map(clip, layers)), SimpleNamespace(lambda_reg=2., lambda_fusion=1.)
    prompts, ids = model.prompts(dear.tokenize(clip, TEXTS)), open_clip.SimpleTokenizer(context_length=20)(TEXTS)
    f_text0, labels, found = model.frozen_text(prompts), torch.tensor([2, 0, 1]), []
    kept = model.frozen_image(images)
    for features in (lambda: bench.plain_features(model, images, ids), lambda: model(images, prompts),
                     lambda: model(kept, prompts)):
        model.zero_grad()
        loss = train.objective(args, model, features(), f_text0, labels)[0]
        loss.backward()
        found.append([loss.detach(), *[p.grad.clone() for p in model.parameters() if p.requires_grad]])
    assert len(found[0]) == 5 and all(tensor.abs().max() > 0 for tensor in found[0])
    for ours in found[1:]:
        for one, other in zip(found[0], ours):
            assert (one - other).abs().max() <= 1e-4 * one.abs().max()


def test_a_compiled_step_breaks_once_and_does_not_recompile(clips, images, monkeypatch):
    """One break, at the optimizer; after two steps no recompile, whatever the learning rate."""
    from torch._dynamo.utils import counters
    _, clip = clips
    model = model_with(clip, routed(clip))
    args = SimpleNamespace(lambda_reg=2., lambda_fusion=1., lr=1e-3, weight_decay=0., precision="fp32", device="cpu",
                           compile=True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset(), counters.clear()
    prompts, optimizer, graphs = model.prompts(dear.tokenize(clip, TEXTS)), train.make_optimizer(args, model), []
    step = train.make_step(args, model, prompts, optimizer)
    for lr in (1e-3, 9e-4, 5e-4, 1e-4):
        optimizer.param_groups[0]["lr"].fill_(lr)
        optimizer.zero_grad()
        assert step(images + lr, torch.tensor([2, 0, 1])).isfinite().all()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] <= graphs[1] == graphs[3], graphs
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        assert graphs[3] <= 3 and len(counters["graph_break"]) == 1, (graphs, counters["graph_break"])


def test_chunks_of_classes_change_nothing(clips):
    _, clip = clips
    tokens, results = dear.tokenize(clip, TEXTS + ["a dog", "a very small red house"]), []
    for chunk in (100, 2):
        model = model_with(clip, routed(clip), chunk=chunk)
        prompts = model.prompts(tokens)
        f_text = model.adapted_text(prompts)
        f_text[:, 0].sum().backward()
        results.append((f_text.detach(), model.frozen_text(prompts), model.text_tokens.grad))
    torch.testing.assert_close(*results)


def test_learning_rate():
    rates = [train.learning_rate(epoch, 4, 2e-3) for epoch in range(4)]
    assert rates == pytest.approx([1e-5, 2e-3, 2e-3 * (1 + math.sqrt(0.5)) / 2, 1e-3])
    assert train.learning_rate(0, 1, 2e-3) == 2e-3


def test_checkpoint_round_trip(tmp_path, monkeypatch, clips, images):
    _, clip = clips
    model = model_with(clip, routed(clip), K=3, beta=0.4)
    dear.save_checkpoint(tmp_path / "seed1.pt", model, classes=TEXTS)
    again, state = dear.load_checkpoint(tmp_path / "seed1.pt")
    assert state["classes"] == TEXTS and set(state["trained"]) == {"attr_tokens", "text_tokens", "attr_proj", "w"}
    tokens = dear.tokenize(clip, TEXTS)
    with torch.no_grad():
        for one, other in zip(model(images, model.prompts(tokens)), again(images, again.prompts(tokens))):
            assert torch.equal(one, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert {feature.dtype for feature in model(images, model.prompts(tokens))} == {torch.float32}
    for w, message in (torch.zeros(9), "w is"), (torch.full((6,), torch.nan), "values of w that are no finite"):
        with pytest.raises(dear.InputError, match=message):
            again.load_trained({**state["trained"], "w": w})
    for changes, message in (dict(quick_gelu=True), "trained with GELU"), (dict(fingerprint="0"), "trained on other weights"):
        other = type("", (), {**vars(clip), "layers": 12, **changes})
        with pytest.raises(dear.InputError, match=message):
            dear.load_checkpoint(tmp_path / "seed1.pt", other)
    with pytest.raises(dear.InputError, match="do not fit 3 heads"):
        dear.DeAR(clip, dear.Roles("a", torch.ones(4, 1, 1, dtype=torch.bool), ""))

    before = (tmp_path / "seed1.pt").read_bytes()
    monkeypatch.setattr(dear.os, "replace", lambda *paths: 1 / 0)                          # cut off before the move
    with pytest.raises(ZeroDivisionError):
        dear.save_checkpoint(tmp_path / "seed1.pt", again)
    assert (tmp_path / "seed1.pt").read_bytes() == before
    (tmp_path / "seed1.pt").write_bytes(before[:-100])
    with pytest.raises(dear.InputError, match="is damaged"):
        dear.read_checkpoint(tmp_path / "seed1.pt")


# --------------------------------------------------------------------------------------------------------------- data

def test_few_shot_is_dassls():
    """Two classes, the second first in the list and short: drawn in first-seen order, then val from the same stream."""
    items = [data.Item(f"b{i}", 1) for i in range(3)] + [data.Item(f"a{i}", 0) for i in range(20)]
    train_items, val = data.few_shot(items, items, shots=8, seed=1)
    rng = random.Random(1)
    assert [item.image for item in train_items] == ["b0", "b1", "b2"] + [f"a{i}" for i in rng.sample(range(20), 8)]
    assert [item.image for item in val] == ["b0", "b1", "b2"] + [f"a{i}" for i in rng.sample(range(20), 4)]
    # Positions published for DTD's 47 x 60 training list (cross_modal_adaptation, indices/dtd/shot_*-seed_*.json)
    dtd = [data.Item(i, i // 60) for i in range(2820)]
    assert [item.image for item in data.few_shot(dtd, [], 1, 1)[0]][:8] == [8, 96, 174, 231, 288, 304, 376, 427]
    assert [item.image for item in data.few_shot(dtd, [], 16, 3)[0]][:9] == [15, 37, 34, 8, 23, 38, 30, 40, 58]


def test_base_and_novel():
    assert data.halves("abcde") == ([0, 1, 2], [3, 4])
    items = [data.Item(name, label) for label, name in enumerate("abcde")]
    assert data.select(items[::-1], [3, 4]) == [data.Item("e", 1), data.Item("d", 0)]


def picture(path, color=(200, 30, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 30), color).save(path)


def test_own_folder(tmp_path):
    for name in ("red_car", "boat"):
        for i in range(10):
            picture(tmp_path / "flat" / name / f"{i}.png")
    (tmp_path / "flat" / ".cache").mkdir()
    flat, template, _ = data.load(str(tmp_path / "flat"))
    assert flat.classes == ["boat", "red_car"]
    assert data.prompts(template, flat.classes) == ["a photo of a boat.", "a photo of a red car."]
    assert [len(part) for part in (flat.train, flat.val, flat.test)] == [10, 0, 10] and "seeded" in flat.split
    assert len({item.image for item in flat.train + flat.val + flat.test}) == 20
    assert data.load(str(tmp_path / "flat"))[0] == flat

    picture(tmp_path / "parted" / "train" / "cat" / "deep" / "1.jpg")
    picture(tmp_path / "parted" / "test" / "cat" / "2.jpg")
    (tmp_path / "parted" / "test" / "cat" / "._2.jpg").write_text("what macOS leaves behind")
    (tmp_path / "parted" / "test" / "cat" / "album.jpg").mkdir()
    parted = data.load(str(tmp_path / "parted"))[0]
    assert [(item.image.name, item.label) for item in parted.train + parted.test] == [("1.jpg", 0), ("2.jpg", 0)]
    picture(tmp_path / "parted" / "test" / "dog" / "3.jpg")
    with pytest.raises(data.InputError, match="'dog' is in only one of train/ and test/"):
        data.load(str(tmp_path / "parted"))
    picture(tmp_path / "flat" / "yacht" / "only.png")
    with pytest.raises(data.InputError, match="no train image of the class 'yacht'"):
        data.load(str(tmp_path / "flat"))


def sizes(monkeypatch, name, *numbers):
    """A small tree in place of the full data set."""
    monkeypatch.setitem(data.DATASETS, name, data.DATASETS[name]._replace(sizes=numbers))


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_split_file_and_its_faults(tmp_path, monkeypatch, capsys):
    rows = {part: [[f"{name}/{name}_{i}.jpg", label, name] for label, name in enumerate(("banded", "dotted"))]
            for i, part in enumerate(("train", "val", "test"))}
    images = tmp_path / "dtd" / "images"
    touch(*[images / path for path, *_ in sum(rows.values(), [])])
    split = tmp_path / "dtd" / "split_zhou_DescribableTextures.json"
    split.write_text(json.dumps(rows))
    with pytest.raises(data.InputError, match="gives 2 classes, 2 training, 2 .* expected 47 classes, 2820 training"):
        data.load("dtd", tmp_path)
    dtd, template, lambda_reg = data.load("dtd", tmp_path, split)
    sizes(monkeypatch, "dtd", 2, 2, 2, 2)
    assert data.load("dtd", tmp_path)[0] == dtd
    assert (dtd.classes, template, lambda_reg, dtd.split) == (["banded", "dotted"], "{} texture.", 6.0, split.name)
    assert dtd.test[1] == data.Item(images / "dotted" / "dotted_2.jpg", 1)
    (images / "dotted" / "dotted_2.jpg").unlink()
    with pytest.raises(data.InputError, match=r"1 of the 6 images .* are missing, such as .*dotted_2.jpg; looked in"):
        data.load("dtd", tmp_path)
    row = rows["train"][0]
    for wrong, message in [({"train": []}, "not in CoOp's format"), ({**rows, "val": [row]}, "names .* more than once"),
                           ({**rows, "val": [["x.jpg", 0, "dotted"]]}, "x.jpg has the label 0 and the class dotted"),
                           ({**rows, "val": [["x.jpg", 0.9, "banded"]]}, "label 0.9"),
                           ({**rows, "val": [["x.jpg", 3, "x"]]}, "run from 0 without gaps"),
                           ({**rows, "test": rows["val"][:1], "val": []}, "no test image of the class 'dotted'")]:
        split.write_text(json.dumps(wrong))
        with pytest.raises(data.InputError, match=message):
            data.load("dtd", tmp_path, split)

    split.unlink()                                         # then CoOp's is downloaded, and checked
    touch(*[images / name / f"{i}.jpg" for i in range(10) for name in ("banded", "dotted")])
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: io.BytesIO(b"{}"))
    with pytest.raises(data.InputError, match="is not the file it was"):
        data.load("dtd", tmp_path)
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: open("/nowhere"))
    sizes(monkeypatch, "dtd", 2, 12, 5, 8)                 # 13 and 12 images
    assert data.load("dtd", tmp_path)[0].split == "seeded (not CoOp's)" and "put CoOp's" in capsys.readouterr().out


def test_splits_are_drawn_as_zhous():
    """Positions in the published files: UCF101's first class (101 training videos) and Flowers' (251 images)."""
    train_items, val = data.carve([(i, 0) for i in range(101)])
    assert [i for i, _ in val[:6]] == [84, 38, 66, 52, 4, 20] and len(val) == 20
    assert [i for i, _ in train_items[:3]] == [24, 68, 87]
    parts = data.shares([(i, 0) for i in range(251)])
    assert [len(part) for part in parts] == [126, 50, 75]
    assert [i for i, _ in parts[0][:6]] == [189, 66, 233, 240, 39, 102] and [i for i, _ in parts[2][:2]] == [171, 129]


def official_trees(root):
    """Each data set in its official layout, with two classes where it can be: {name: class names as CoOp has them}."""
    def write(path, *lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    many = range(1, 6)
    # training lists of five images a class, of which one goes to val, and test lists of one
    pets = [(f"{breed}_{i}", label) for label, breed in enumerate(("Abyssinian", "american_bulldog"), 1) for i in many]
    write(root / "oxford_pets/annotations/trainval.txt", *[f"{name} {label} 1 1" for name, label in pets])
    write(root / "oxford_pets/annotations/test.txt", "Abyssinian_9 1 1 1", "american_bulldog_9 2 1 1")
    touch(*[root / "oxford_pets/images" / f"{name}.jpg" for name, _ in [*pets, ("Abyssinian_9", 1),
                                                                      ("american_bulldog_9", 2)]])
    annotations = np.zeros((1, 12), dtype=[("fname", "O"), ("class", "O")])
    for i in range(12):
        annotations[0, i] = f"{i + 1:05}.jpg", 2 - i % 2   # the second class comes first
        touch(root / "stanford_cars" / ("cars_train" if i < 10 else "cars_test") / f"{i + 1:05}.jpg")
    names = np.array([["Audi TTS Coupe 2012", "Ram C/V Cargo Van Minivan 2012"]], dtype=object)
    touch(root / "stanford_cars/devkit/cars_meta.mat")
    for file, value in (("devkit/cars_meta", {"class_names": names}),
                        ("devkit/cars_train_annos", {"annotations": annotations[:, :10]}),
                        ("cars_test_annos_withlabels", {"annotations": annotations[:, 10:]})):
        scipy.io.savemat(root / "stanford_cars" / f"{file}.mat", value)
    labels = np.array([[60] * 10 + list(range(1, 60)) * 10])                           # unsorted, as the official ones
    touch(*[root / "oxford_flowers/jpg" / f"image_{i:05}.jpg" for i in range(1, labels.size + 1)])
    scipy.io.savemat(root / "oxford_flowers/imagelabels.mat", {"labels": labels})
    write(root / "fgvc_aircraft/variants.txt", "707-320", "Boeing 717")
    for k, part in enumerate(("train", "val", "test")):
        write(root / f"fgvc_aircraft/images_variant_{part}.txt", f"{k}0 Boeing 717", f"{k}1 707-320")
        touch(*[root / "fgvc_aircraft/images" / f"{k}{i}.jpg" for i in (0, 1)])
    places = ["/a/abbey", "/a/apartment_building/outdoor"]
    write(root / "sun397/ClassName.txt", *places)
    for file, numbers in (("Training_01", many), ("Testing_01", [9])):
        write(root / "sun397" / f"{file}.txt", *[f"{place}/sun_{i}.jpg" for place in places for i in numbers])
        touch(*[root / f"sun397/SUN397{place}/sun_{i}.jpg" for place in places for i in numbers])
    lists, actions = root / "ucf101/ucfTrainTestlist", {"Hammering": "Hammering", "HandstandPushups": "Handstand_Pushups"}
    write(lists / "classInd.txt", "1 Hammering", "2 HandstandPushups")
    for file, numbers in (("trainlist01", many), ("testlist01", [9])):
        write(lists / f"{file}.txt", *[f"{action}/v_{action}_g{i}.avi" + f" {label}" * (file == "trainlist01")
                                       for label, action in enumerate(actions, 1) for i in numbers])
        touch(*[root / f"ucf101/UCF-101-midframes/{name}/v_{action}_g{i}.jpg" for action, name in actions.items()
                for i in numbers])
    # class folders of ten
    for folder, classes in (("caltech-101/101_ObjectCategories", ("Faces", "Faces_easy", "BACKGROUND_Google", "accordion")),
                            ("eurosat/2750", ("AnnualCrop", "SeaLake")), ("food-101/images", ("apple_pie", "waffles")),
                            ("dtd/images", ("banded", "zigzagged"))):
        touch(*[root / folder / name / f"{i}.jpg" for name in classes for i in range(10)])
    wnids = data.ImageNetInfo().label_names()
    touch(*[root / "imagenet/images" / part / wnid / "1.JPEG" for part in ("train", "val") for wnid in wnids],
          *[root / "imagenet-sketch/images" / wnid / "1.JPEG" for wnid in wnids],
          *[root / "imagenetv2/imagenetv2-matched-frequency-format-val" / str(k) / "1.jpeg" for k in range(1000)],
          *[root / folder / wnid / "1.jpg" for folder in ("imagenet-adversarial/imagenet-a", "imagenet-rendition/imagenet-r")
            for wnid in wnids[5::5]], root / "imagenet-rendition/imagenet-r/README.txt")
    imagenet, flowers = list(open_clip.IMAGENET_CLASSNAMES), torchvision.datasets.Flowers102.classes
    return {"imagenet": imagenet, "caltech101": ["face", "accordion"], "oxford_pets": ["abyssinian", "american_bulldog"],
            "stanford_cars": ["2012 Audi TTS Coupe", "2012 Ram C/V Cargo Van Minivan"],
            "oxford_flowers": [*flowers[:59], "pink-yellow dahlia"], "food101": ["apple_pie", "waffles"],
            "fgvc_aircraft": ["707-320", "Boeing 717"], "sun397": ["abbey", "outdoor apartment_building"],
            "dtd": ["banded", "zigzagged"], "eurosat": ["Annual Crop Land", "Sea or Lake"],
            "ucf101": ["Hammering", "Handstand_Pushups"], "imagenetv2": imagenet, "imagenet_sketch": imagenet,
            "imagenet_a": imagenet[5::5], "imagenet_r": imagenet[5::5]}


def test_the_fifteen_in_their_official_layouts(tmp_path, monkeypatch):
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: open("/nowhere"))
    names = official_trees(tmp_path)
    assert list(names) == list(data.DATASETS) == [*data.TRAINABLE, *data.VARIANTS]
    carved, shared, variant = (2, 8, 2, 2), (2, 10, 4, 6), (0, 0)
    counts = {"imagenet": (1000, 1000, 0, 1000), "fgvc_aircraft": (2, 2, 2, 2), "oxford_flowers": (60, 300, 120, 180),
              **dict.fromkeys(("caltech101", "food101", "dtd", "eurosat"), shared),
              **dict.fromkeys(("oxford_pets", "stanford_cars", "sun397", "ucf101"), carved),
              **dict.fromkeys(("imagenetv2", "imagenet_sketch"), (1000, *variant, 1000)),
              **dict.fromkeys(("imagenet_a", "imagenet_r"), (199, *variant, 199))}
    for name in names:
        with pytest.raises(data.InputError, match=f"--dataset {name}: .* expected .* Complete it"):
            data.load(name, tmp_path)                      # it is not all there
        sizes(monkeypatch, name, *counts[name])
        found, template, _ = data.load(name, tmp_path)
        assert found.classes == names[name]
        assert "{}" in template and len({item.image for item in found.train + found.val + found.test}) == sum(
            counts[name][1:])
    assert names["imagenet"].count("missile") == 2
    cars, flowers = [data.load(name, tmp_path)[0] for name in ("stanford_cars", "oxford_flowers")]
    assert cars.train[0].label == 1 and flowers.train[0].label == 59                   # not sorted by label
    assert [item.image.name for item in cars.test] == ["00011.jpg", "00012.jpg"]
    order = [f"{2 * i + 1:05}.jpg" for i in range(5)]      # of the second car, shuffled first, with seed 1
    random.Random(1).shuffle(order)
    assert [item.image.name for item in (cars.val + cars.train)[:1] + cars.train[:4]] == order
    assert data.load("imagenetv2", tmp_path)[0].test[10].image.parent.name == "10"

    (tmp_path / "oxford_pets/annotations/test.txt").unlink()
    (tmp_path / "imagenet-sketch/images/n01440764/1.JPEG").unlink()
    (tmp_path / "imagenet-sketch/images/n01440764").rmdir()
    (tmp_path / "stanford_cars/devkit/cars_meta.mat").write_text("no mat")
    (tmp_path / "sun397/Testing_01.txt").write_text("/b/bar/sun_1.jpg\n")
    (tmp_path / "ucf101/UCF-101-midframes/Hammering/v_Hammering_g1.jpg").unlink()
    (tmp_path / "imagenet-adversarial/imagenet-a").rename(tmp_path / "imagenet-adversarial/elsewhere")
    (tmp_path / "oxford_flowers/imagelabels.mat").unlink()
    for name, message in [("oxford_pets", "No such file .*test.txt; .* holds annotations, images; expected the official"),
                          ("oxford_flowers", "No such file .*imagelabels.mat; .* there: .*Flowers102 downloads"),
                          ("imagenet_sketch", "999 class folders: 1 are missing .n01440764"),
                          ("stanford_cars", "are not the official ones .*cars_meta.mat: "), ("sun397", "are not the official ones .KeyError"),
                          ("ucf101", "1 of the 12 images .* such as .*v_Hammering_g1.jpg; looked in"),
                          ("imagenet_a", "no images in .*imagenet-a .*holds elsewhere.; expected 199 images of 199 cl")]:
        with pytest.raises(data.InputError, match=message):
            data.load(name, tmp_path)


def test_transforms_equal_open_clips(tmp_path, monkeypatch):
    noise = torch.randint(0, 256, (31, 47, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image = Image.fromarray(noise.numpy())
    for squash in (False, True):
        clip = type("", (), dict(image_size=24, mean=(.1, .2, .3), std=(.4, .5, .6), squash=squash))
        theirs = open_clip.image_transform(24, False, clip.mean, clip.std, "squash" if squash else "shortest")
        torch.testing.assert_close(data.transform(clip, train=False)(image), theirs(image))
    crop, flip, *_ = data.transform(clip, train=True).transforms
    assert (crop.scale, crop.interpolation, flip.p) == ((0.5, 1), data.v2.InterpolationMode.BICUBIC, 0.5)
    Image.new("I;16", (4, 4), 40000).save(tmp_path / "deep.png")
    with pytest.raises(data.InputError, match="deep.png' is not a readable image .*convert it to 8 bits"):
        data.Images([data.Item(tmp_path / "deep.png", 0)], None)[0]
    monkeypatch.setattr(data.Image, "open", lambda file: 1 / 0)                        # as a plugin may on odd bytes
    with pytest.raises(data.InputError, match="x.tif' is not a readable image"):
        data.Images([data.Item("x.tif", 0)], None)[0]


def test_augmentation_depends_on_seed_and_image_alone():
    clip = type("", (), dict(image_size=16, mean=(.5,) * 3, std=(.5,) * 3, squash=False))
    noise = torch.randint(0, 256, (20, 20, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    items = [data.Item(Image.fromarray(noise.numpy()), label) for label in range(7)]
    runs = [list(data.batches(items, data.transform(clip, train=True), 3, seed=seed, workers=workers))
            for seed, workers in ((5, 0), (5, 2), (6, 0))]
    assert [labels.tolist() for _, labels in runs[0]] == [labels.tolist() for _, labels in runs[1]]
    assert len(runs[0]) == 2 and all(torch.equal(a, b) for (a, _), (b, _) in zip(runs[0], runs[1]))
    assert not torch.equal(runs[0][0][0], runs[2][0][0])
    assert len(list(data.batches(items, data.transform(clip, train=False), 3))) == 3


# --------------------------------------------------------------------------------------------------------------- demo

def test_the_demo_task_is_balanced_and_drawn_from_its_seed():
    names, *parts = shapes.task(train=2, test=1)
    assert len(set(names)) == 48 and [len(part) for part in parts] == [96, 48]
    for half in (names[:24], names[24:]):
        for position, factor in enumerate(("texture", "color", "object")):
            words = [name.split()[position] for name in half]
            assert {words.count(value) for value in shapes.FACTORS[factor]} == {24 // len(shapes.FACTORS[factor])}
    again = shapes.task(train=2, test=1)[1]
    assert all((a == b).all() and k == l and m == n for (a, k, m), (b, l, n) in zip(parts[0], again))
    assert [' '.join(scene[factor] for factor in ('texture', 'color', 'object')) for _, _, scene in again[::2]] == names


def run(*flags):
    with pytest.raises(SystemExit) as stopped:
        train.main([str(flag) for flag in flags])
    return stopped.value.code


@pytest.fixture
def small_task(monkeypatch):
    """The demo's task with fewer images."""
    monkeypatch.setattr(shapes, "task", partial(shapes.task, train=4, test=3))


def test_a_run_equals_its_algorithm_written_out(tmp_path, capsys, small_task):
    flags = ("--shots 3 --epochs 3 --seed 3 --lr 0.01 --batch-size 16 --weight-decay 0.3 --text-tokens 3 --beta 0.6 "
             f"--alpha-cls 0.6 --lambda-reg 2 --lambda-fusion 0.3 --output-dir {tmp_path}").split()
    train.main(flags)
    folder, = tmp_path.glob("base2novel/shapes/demo/3shots-text_tokens=3-beta=0.6-*")
    results, output = json.loads((folder / "seed3.json").read_text()), capsys.readouterr().out

    names, *parts = shapes.task()
    training, test = [[data.Item(Image.fromarray(image), label) for image, label, _ in part] for part in parts]
    base, rates = data.few_shot(training, [], 3, seed=3)[0][:24 * 3], (1e-5, 0.01, 0.0075)
    clip = dear.load_clip("demo")
    model = dear.DeAR(clip, dear.read_roles(dear.DEMO / "roles.json", clip), K=3, beta=0.6)
    model.reset(torch.Generator().manual_seed(3), alpha_cls=0.6)
    prompts = [model.prompts(dear.tokenize(clip, [f"a photo of a {name}." for name in half]))
               for half in (names[:24], names[24:])]

    def logits(images, h):
        f_cls, f_attr, f_text, f_cls0 = model(images, prompts[h])
        f_text0 = model.frozen_text(prompts[h])
        attributes = sum(model.alpha[k] * f_attr[:, k - 1] @ f_text.T for k in range(1, 6))
        reg = (1 - F.cosine_similarity(f_cls, f_cls0)).mean() + (1 - F.cosine_similarity(f_text, f_text0)).mean()
        return {"fused": model.alpha[0] * f_cls @ f_text.T + attributes, "class": f_cls @ f_text.T,
                "attributes": attributes, "CLIP": f_cls0 @ f_text0.T}, reg
    optimizer = torch.optim.AdamW([model.attr_tokens, model.text_tokens, model.attr_proj, model.w], weight_decay=0.3)
    means = []
    for epoch, optimizer.param_groups[0]["lr"] in enumerate(rates):
        total = []
        for images, labels in data.batches(base, data.transform(clip, train=True), 16, seed=3 * 10**4 + epoch):
            values, reg = logits(images, 0)
            loss = F.cross_entropy(clip.tau * values["fused"], labels) + 2 * reg - 0.3 * model.alpha[0].log()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total.append(loss.item())
        means.append(sum(total) / len(total))
    saved = dear.read_checkpoint(folder / "seed3.pt")["trained"]
    torch.testing.assert_close(saved, model.trained(), atol=1e-4, rtol=1e-3)
    printed = [float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if line.startswith("seed 3  ep")]
    assert printed == pytest.approx(means, abs=2e-3) and means[2] < means[0]

    model.load_trained(saved)
    for h, half in enumerate(("base", "novel")):
        images = torch.stack([data.transform(clip, train=False)(item.image) for item in test if item.label // 24 == h])
        labels = torch.arange(24).repeat_interleave(3)
        with torch.no_grad():
            right = {branch: 100 * (value.argmax(dim=1) == labels).float().mean().item()
                     for branch, value in logits(images, h)[0].items()}
        assert len(results["tests"][half].pop("data")) == 12
        assert results["tests"][half] == pytest.approx({"classes": 24, "images": 72, **right})
        assert f" {right['fused']:.2f}" in output.split("\nDeAR  ")[1].splitlines()[0]
    assert sum(results["alpha"].values()) == pytest.approx(1)
    assert results["settings"]["quick_gelu"] is False and results["split"] == "rendered"

    train.main([*flags, "--eval-only"])
    again = json.loads((folder / "seed3.eval.json").read_text())["tests"]
    assert {half: {**found, "data": None} for half, found in again.items()} == {
        half: {**found, "data": None} for half, found in results["tests"].items()}


def result(folder, path):
    return json.loads((folder / f"{path}.json").read_text())


def test_an_interrupted_sweep_goes_on_to_the_last_digit(tmp_path, monkeypatch, capsys, small_task):
    demo = ["--shots", 1, 2, "--epochs", 2, "--batch-size", 8, "--seeds", 1, 2]
    train.main([str(flag) for flag in [*demo, "--output-dir", tmp_path / "a"]])
    write = dear.write

    def interrupted(path, state):
        write(path, state)
        if state["seed"] == 2 and state.get("epoch") == 1:
            raise KeyboardInterrupt
    monkeypatch.setattr(dear, "write", interrupted)
    for _ in range(2):
        assert run(*demo, "--output-dir", tmp_path / "b") == 130
    monkeypatch.setattr(dear, "write", write)
    capsys.readouterr()
    train.main([str(flag) for flag in [*demo, "--output-dir", tmp_path / "b"]])
    output = capsys.readouterr().out
    assert output.count("is finished") == 3 and output.count("epoch  2/2") == 1        # the last is trained on
    for shots in (1, 2):
        for seed in (1, 2):
            a, b = [result(tmp_path / folder / "base2novel/shapes/demo", f"{shots}shots-epochs=2-batch_size=8/seed{seed}")
                    for folder in "ab"]
            assert all(a[key] == b[key] for key in ("tests", "alpha", "losses"))
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "b").rglob("seed*")}
    train.main([str(flag) for flag in [*demo, "--output-dir", tmp_path / "b"]])
    assert files == {file: file.stat().st_mtime_ns for file in (tmp_path / "b").rglob("seed*")}


def test_no_run_is_written_over_another(tmp_path, capsys, monkeypatch, small_task):
    demo = ["--shots", 1, "--epochs", 1, "--output-dir", tmp_path]
    train.main([str(flag) for flag in [*demo, "--seeds", 1]])
    folder = tmp_path / "base2novel/shapes/demo/1shots-epochs=1"
    (folder / "seed2.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    lock = open(folder / ".seed1.lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert run(*demo) == 2 and "another run is writing seed 1" in capsys.readouterr().err
    lock.close()
    assert run(*demo, "--seeds", 2) == 2 and "is no result of train.py" in capsys.readouterr().err
    monkeypatch.setitem(train.SHAPES, "lr", 1.0)           # a default that changed, so that the folder is the same
    assert run(*demo) == 2 and "lr 0.005, not 1.0" in capsys.readouterr().err
    monkeypatch.undo()
    roles_file = tmp_path / "mixed"
    roles_file.write_text((dear.DEMO / "roles.json").read_text())
    assert run(*demo, "--roles", roles_file, "--eval-only") == 2 and "no checkpoint" in capsys.readouterr().err
    assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".seed2.lock"}


def test_protocols_summary_prediction_and_retrieval(tmp_path, capsys, small_task):
    for place, seed in (("photos", 0), ("others", 1)):     # two data sets of noise, three classes each
        for name in ("cat", "dog", "red_fox"):
            for i in range(4):
                file = tmp_path / place / name / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(100 * seed + i).integers(0, 255, (48, 48, 3), dtype=np.uint8)
                Image.fromarray(noise).save(file)
    out, quick = tmp_path / "out", ["--model", "demo", "--epochs", 1, "--batch-size", 4]
    source = ["--dataset", tmp_path / "photos", "--shots", 2]
    cross = [*source, *quick, "--protocol", "cross", "--output-dir", out]
    flags = [str(flag) for flag in [*cross, "--targets", "shapes"]]
    train.main(flags)
    path = "transfer/photos/demo/2shots-epochs=1-batch_size=4/seed1"
    first = result(out, path)
    assert {name: (test["classes"], test["images"]) for name, test in first["tests"].items()} == {
        "photos": (3, 6), "shapes": (48, 144)} and first["settings"]["lambda_reg"] == 0.2
    assert {len(result(out, f"{path}.images")[part]) for part in ("train",)} == {6}
    train.main([str(flag) for flag in [*cross, "--targets", "shapes", tmp_path / "others"]])
    second = result(out, path)                             # the checkpoint is tested on what is new
    assert second["tests"] == {**first["tests"], "others": second["tests"]["others"]}
    (tmp_path / "others/dog").rename(tmp_path / "others/emu")                          # and on other data of that name
    train.main([str(flag) for flag in [*cross, "--targets", tmp_path / "others", tmp_path / "others"]])
    third = result(out, path)["tests"]
    assert third == {**second["tests"], "others": third["others"]}
    assert third["others"]["data"] != second["tests"]["others"]["data"]
    assert capsys.readouterr().out.count("epoch  1/1") == 1
    for shots in (1, 2):
        train.main([str(flag) for flag in [*source[:2], *quick, "--protocol", "fewshot", "--shots", shots,
                                           "--output-dir", out]])
    demo = ["--shots", 1, "--epochs", 1, "--seeds", 1, 2, "--output-dir", out]
    for ablation in (None, *train.ABLATIONS):
        train.main([str(flag) for flag in [*demo, *(["--ablate", ablation] if ablation else [])]])
    runs = {ablation: result(out, f"base2novel/shapes/demo/1shots-ablate={ablation}-epochs=1/seed1")
            for ablation in train.ABLATIONS}
    assert set(runs["class-only"]["tests"]["base"]) == {"classes", "images", "data", "CLIP", "fused", "class"}
    assert runs["class-only"]["alpha"]["class"] == 1 and runs["no-attributes"]["alpha"] == {"class": 1}
    assert runs["no-fusion-reg"]["settings"]["lambda_fusion"] == runs["no-reg"]["settings"]["lambda_reg"] == 0
    visible = {ablation: dear.read_checkpoint(run["checkpoint"])["visible"] for ablation, run in runs.items()}
    full = visible["no-reg"]
    assert visible["no-mask"].all() and visible["no-attributes"].shape[-1] == 0
    assert torch.equal(visible["generalization-mask"], full.any(-1, keepdim=True).expand_as(full)) and not full.all()

    (out / "made_up").mkdir()
    (out / "made_up" / "seed1.json").write_text(json.dumps({**first, "dataset": "imagenet", "tests": {
        name: {"CLIP": 50, "fused": value} for name, value in (("imagenet", 60), ("dtd", 40), ("eurosat", 45),
                                                               ("imagenet_a", 30), ("photos", 20))}}))
    copy, half = out / "made_up" / "copy" / "seed1.json", out / "made_up" / "half" / "seed1.json"
    base = result(out, "base2novel/shapes/demo/1shots-epochs=1/seed1")
    for file, value in (copy, base), (half, {**base, "seed": 7, "tests": {"base": base["tests"]["base"]}}):
        file.parent.mkdir()
        file.write_text(json.dumps(value))
    train.main(["--summarize", str(out)])
    assert f"left out: {half}" in capsys.readouterr().out
    summary = (out / "summary.md").read_text()
    assert (out / "fewshot.png").exists() and "MMRL, published | 85.68 | 77.16 | 81.20 |" in summary
    title, line = "**DeAR, ours** (demo, 2 shots, epochs=1, batch_size=4)", [line for line in summary.splitlines()
                                                                           if line.startswith("| **DeAR, ours** (demo, 2")]
    few = title + ", average over {} of {}"                # the average is of targets alone
    assert line == [f"| {few.format(2, 10)} | 60.00 |{' – |' * 7} 40.00 | 45.00 | – | 42.50 |",
                    f"| {few.format(1, 4)} | 60.00 | – | – | 30.00 | – | 30.00 |",
                    f"| {title} | 60.00 | 20.00 | 20.00 |", line[-1]]
    assert summary.count("| DeAR, demo, 1 shots, epochs=1, over shapes |") == 1
    assert train.spelled("ablate=no-reg-lr=1e-05-epochs=3") == "ablate=no-reg, lr=1e-05, epochs=3"
    copy.write_text(json.dumps({**base, "tests": {name: {**found, "fused": 1.0} for name, found in base["tests"].items()}}))
    assert run("--summarize", out) == 2 and "hold different results of one run" in capsys.readouterr().err
    copy.write_text(json.dumps({**base, "seed": "1"}))
    assert run("--summarize", out) == 2 and "is no result of train.py" in capsys.readouterr().err
    assert summary.count("Cross-dataset, trained on") == 2 and "MMRL, published | 72.03 | 94.67" in summary
    tests = [result(out, f"base2novel/shapes/demo/1shots-epochs=1/seed{seed}")["tests"] for seed in (1, 2)]
    values = [[test[half]["fused"] for test in tests] for half in ("base", "novel")]
    base, novel = map(statistics.mean, values)
    assert (f"| {base:.2f} ± {statistics.stdev(values[0]):.2f} | {novel:.2f} ± {statistics.stdev(values[1]):.2f} | "
            f"{2 / (1 / base + 1 / novel):.2f} ±") in summary
    assert train.average([{"base": 80, "novel": 60, "HM": 1}, {"base": 60, "novel": 20, "HM": 1}]) == {
        "base": 70, "novel": 40, "HM": 2 * 70 * 40 / (70 + 40)}

    capsys.readouterr()
    checkpoint, image = ["--checkpoint", out / f"{path}.pt"], tmp_path / "photos" / "cat" / "0.png"
    train.main([str(flag) for flag in ["--predict", tmp_path / "photos", *checkpoint]])
    header, *rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert header[:3] == ["image", "class1", "probability1"] and len(rows) == 12
    model, saved = dear.load_checkpoint(out / f"{path}.pt")
    prompts = model.prompts(dear.tokenize(model.clip, [f"a photo of a {name}." for name in ("cat", "dog", "red fox")]))
    with torch.no_grad():
        f_cls, f_attr, f_text, _ = model(data.transform(model.clip, False)(Image.open(image))[None], prompts)
        best, which = dear.fuse(f_cls, f_attr, f_text, model.alpha, model.clip.tau).softmax(dim=1)[0].max(dim=0)
    assert rows[0][:3] == [str(image), saved["classes"][which], f"{best:.4f}"]
    train.main([str(flag) for flag in ["--predict", image, *checkpoint, "--classes", "boat", "red car"]])
    assert {line.split("%  ")[1] for line in capsys.readouterr().out.splitlines()} == {"boat", "red car"}
    train.main([str(flag) for flag in ["--retrieve", image, "--gallery", tmp_path, "--output-dir", tmp_path, *checkpoint]])
    assert "class        0.png 1.000" in capsys.readouterr().out and (tmp_path / "retrieved-0.png").exists()
    for place in ("other/photos/cat", "alone"):
        picture(tmp_path / place / "1.png"), picture(tmp_path / place / "2.png")
    (tmp_path / "alone" / "2.png").unlink()
    for flags, message in [(["--predict", tmp_path / "none.jpg", *checkpoint], "no such file"),
                           ([*cross, "--targets", tmp_path / "other/photos"], "two data sets are named photos"),
                           ([*cross, "--targets", tmp_path / "other"], "has one class"),
                           ([*demo, "--ablate", "no-reg", "--lambda-reg", 5], "no-reg: sets --lambda-reg itself"),
                           (["--retrieve", tmp_path / "alone/1.png", "--gallery", tmp_path / "alone", *checkpoint],
                            "no image there but the query"),
                           (["--predict", image], "need --checkpoint"), (["--retrieve", image, *checkpoint], "--gallery"),
                           (["--summarize", tmp_path / "photos"], "no seed*.json"),
                           (["--dataset", "all", "--protocol", "cross"], "base2novel or fewshot"),
                           (["--targets", "dtd"], "go with --protocol cross"),
                           (["--dataset", "all", "--data-root", tmp_path], "no images in")]:
        assert run(*flags) == 2
        assert message in capsys.readouterr().err


def test_neighbours_share_by_hand(capsys):
    """Two rows of features, by which four images pair off by color, and by shape."""
    angles = torch.tensor([[0., 0.], [.1, 2.], [2., .1], [2.1, 2.1]])
    found = torch.stack([angles.cos(), angles.sin()], dim=-1)
    scenes = [{"color": color, "shape": shape} for color in "rb" for shape in "st"]
    train.neighbours_share(("class", "shape"), found, scenes, top=1)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["by", "color", "shape"], ["class", "100.00", "0.00"], ["shape", "0.00", "100.00"],
                     ["chance", "33.33", "33.33"]]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name in "abcd":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            (tmp_path / "images" / name / f"{i}.jpg").write_text("no image")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    for flags, message in [
            (["--dataset", tmp_path / "nowhere"], "neither a folder nor one of shapes, imagenet"),
            (["--dataset", tmp_path / "empty"], "holds no class folders"),
            (["--dataset", tmp_path / "images", "--model", "demo", "--workers", 2], "is not a readable image"),
            (["--model", "ViT-Z"], "neither a folder nor a configuration of OpenCLIP"),
            (["--model", "RN50", "--pretrained", "openai"], "a ResNet"),
            (["--model", "ViT-B-16-SigLIP", "--pretrained", "webli"], "vision_cfg.timm_model_name"),
            (["--model", "ViT-B-16", "--pretrained", "mytag"], "its tags: openai"),
            (["--model", "ViT-B-16", "--pretrained", tmp_path / "other.pt"], "does not fit the model"),
            (["--model", "ViT-B-16", "--pretrained", tmp_path / "broken.json"], "not a readable weights file"),
            (["--roles", tmp_path / "none.json"], "No such file"),
            (["--roles", tmp_path / "broken.json"], "is not a JSON role map"),
            (["--eval-only", "--output-dir", tmp_path / "none"], "no checkpoint"),
            (["--shots", "0"], "from 1 on"), (["--lr", "inf"], "between 0 and"), (["--weight-decay", "inf"], "from 0"),
            (["--beta", "2"], "between 0 and 1"),
            (["--template", "a photo"], "needs one {}"), (["--device", "cuda:99"], "argument --device")]:
        assert run(*flags, *([] if "--output-dir" in flags else ["--output-dir", tmp_path / "out"])) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("train.py: error:") or "error: argument" in error
        assert message in error


def test_a_non_finite_loss_stops_the_run(tmp_path, capsys, small_task):
    assert run("--shots", 2, "--epochs", 2, "--lr", 1e30, "--output-dir", tmp_path) == 1
    assert "try a lower --lr" in capsys.readouterr().err
    assert not list(tmp_path.rglob("seed1.pt"))
    assert run("--shots", 2, "--epochs", 1, "--lr", 1e30, "--batch-size", 48, "--output-dir", tmp_path / "one") == 1
    assert "logits of fused are not finite" in capsys.readouterr().err
    assert not list(tmp_path.rglob("seed1.json"))
