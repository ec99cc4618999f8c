"""Exact checks: against open_clip, against dense oracles, against values worked out by hand. No network.

    python -m pytest test_dear.py
"""
import fcntl
import io
import json
import math
import random
from functools import partial
from types import SimpleNamespace

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

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
    torch.testing.assert_close(model.frozen_image(model.image_prefix(images)),
                               F.normalize(clip.encode_image(images), dim=-1))
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
    gradient, = torch.autograd.grad(f_cls.square().sum() + f_cls[0, 0], model.attr_tokens, retain_graph=True)
    assert gradient.abs().max() == 0
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
    items = [data.Item(Image.fromarray(image), 0) for image, _ in shapes.task(train=1, test=1)[1][:5]]
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
    args = SimpleNamespace(roles=None, quick_gelu=None)
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
    state["trained"]["w"] = torch.zeros(9)
    with pytest.raises(dear.InputError, match="w is"):
        again.load_trained(state["trained"])
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
    parted = data.load(str(tmp_path / "parted"))[0]
    assert [(item.image.name, item.label) for item in parted.train + parted.test] == [("1.jpg", 0), ("2.jpg", 0)]
    picture(tmp_path / "parted" / "test" / "dog" / "3.jpg")
    with pytest.raises(data.InputError, match="'dog' is in only one of train/ and test/"):
        data.load(str(tmp_path / "parted"))
    picture(tmp_path / "flat" / "yacht" / "only.png")
    with pytest.raises(data.InputError, match="no train image of the class 'yacht'"):
        data.load(str(tmp_path / "flat"))


def test_dtd_in_coops_layout(tmp_path, monkeypatch):
    rows = {part: [[f"{name}/{name}_{i}.jpg", label, name] for label, name in enumerate(("banded", "dotted"))]
            for i, part in enumerate(("train", "val", "test"))}
    for path, *_ in sum(rows.values(), []):
        picture(tmp_path / "dtd" / "images" / path)
    split = tmp_path / "dtd" / "split_zhou_DescribableTextures.json"
    split.write_text(json.dumps(rows))
    dtd, template, lambda_reg = data.load("dtd", str(tmp_path))
    assert (dtd.classes, template, lambda_reg, dtd.split) == (["banded", "dotted"], "{} texture.", 6.0, split.name)
    assert dtd.test[1] == data.Item(tmp_path / "dtd" / "images" / "dotted" / "dotted_2.jpg", 1)
    (tmp_path / "dtd" / "images" / "dotted" / "dotted_2.jpg").unlink()
    with pytest.raises(data.InputError, match=r"1 of the 6 images .* are missing, such as .*dotted_2.jpg"):
        data.load("dtd", str(tmp_path))
    row = rows["train"][0]
    for wrong, message in [({"train": []}, "not in CoOp's format"), ({**rows, "val": [row]}, "names .* more than once"),
                           ({**rows, "val": [["x.jpg", 0, "dotted"]]}, "x.jpg has the label 0 and the class dotted"),
                           ({**rows, "val": [["x.jpg", 0.9, "banded"]]}, "label 0.9"),
                           ({**rows, "val": [["x.jpg", 3, "x"]]}, "run from 0 without gaps")]:
        split.write_text(json.dumps(wrong))
        with pytest.raises(data.InputError, match=message):
            data.load("dtd", str(tmp_path))

    split.unlink()                                         # then CoOp's is downloaded, and checked
    for i in range(10):
        for name in ("banded", "dotted"):
            picture(tmp_path / "dtd" / "images" / name / f"{i}.jpg")
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: io.BytesIO(b"{}"))
    with pytest.raises(data.InputError, match="is not the file it was"):
        data.load("dtd", str(tmp_path))
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *args, **kwargs: open("/nowhere"))
    found = data.load("dtd", str(tmp_path))[0]             # 13 and 12 images
    assert [len(part) for part in found[1:4]] == [12, 5, 8] and found.split == "seeded (not CoOp's)"


def test_transforms_equal_open_clips(tmp_path):
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
    assert all((a == b).all() and k == l for (a, k), (b, l) in zip(parts[0], again))


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
    results, output = json.loads((tmp_path / "results.json").read_text()), capsys.readouterr().out
    found, = results["runs"]

    names, *parts = shapes.task()
    training, test = [[data.Item(Image.fromarray(image), label) for image, label in part] for part in parts]
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
    saved = dear.read_checkpoint(tmp_path / "seed3.pt")["trained"]
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
        assert results["zero_shot"][half] == pytest.approx(right.pop("CLIP"))
        assert found["branches"][half] == pytest.approx(right)
        assert found[half] == results["DeAR"][half] == pytest.approx(right["fused"])
    assert results["DeAR"]["HM"] == pytest.approx(2 / (1 / found["base"] + 1 / found["novel"]))
    assert sum(results["alpha"].values()) == pytest.approx(1)
    assert results["config"]["quick_gelu"] is False and results["split"] == "rendered"

    train.main([*flags, "--eval-only"])
    again = json.loads((tmp_path / "eval.json").read_text())
    assert (again["DeAR"], again["runs"]) == (results["DeAR"], results["runs"])


def test_an_interrupted_sweep_resumes_to_the_last_digit(tmp_path, monkeypatch, small_task):
    demo = ["--shots", 2, "--epochs", 3, "--batch-size", 8, "--seeds", 1, 2]
    train.main([str(flag) for flag in [*demo, "--output-dir", tmp_path / "a"]])
    write = dear.write

    def interrupted(path, state):
        write(path, state)
        if state["seed"] == 2 and state.get("epoch") == 2:
            raise KeyboardInterrupt
    monkeypatch.setattr(dear, "write", interrupted)
    assert run(*demo, "--output-dir", tmp_path / "b") == 130
    monkeypatch.setattr(dear, "write", write)
    train.main([str(flag) for flag in [*demo, "--output-dir", tmp_path / "b", "--resume"]])
    one, other = [json.loads((tmp_path / folder / "results.json").read_text())["runs"] for folder in "ab"]
    for run_a, run_b in zip(one, other, strict=True):
        assert all(run_a[key] == run_b[key] for key in ("seed", "branches", "alpha", "losses"))


def test_no_run_is_written_over_another(tmp_path, capsys, small_task):
    demo = ["--shots", 1, "--epochs", 1, "--output-dir", tmp_path]
    train.main([str(flag) for flag in [*demo, "--seeds", 1, 2]])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for flags, message in [(["--lr", 1, "--seeds", 1, 2], "lr 0.005, not 1.0"), (["--lr", 1, "--seeds", 3], "lr 0.005"),
                           (["--seeds", 3], "also holds seed 1"), (["--roles", "mixed"], "made with other roles"),
                           (["--eval-only", "--beta", 0], "made with beta 0.9, not 0.0")]:
        assert run(*demo, *flags) == 2
        assert message in capsys.readouterr().err
    lock = open(tmp_path / ".lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert run(*demo, "--seeds", 1, 2, "--eval-only") == 2 and "another run is writing" in capsys.readouterr().err
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name in "abcd":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            (tmp_path / "images" / name / f"{i}.jpg").write_text("no image")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    for flags, message in [
            (["--dataset", tmp_path / "nowhere"], "neither a folder nor one of shapes, dtd"),
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
    assert not (tmp_path / "seed1.pt").exists()
    assert run("--shots", 2, "--epochs", 1, "--lr", 1e30, "--batch-size", 48, "--output-dir", tmp_path / "one") == 1
    assert "logits of fused are not finite" in capsys.readouterr().err
    assert not (tmp_path / "one" / "results.json").exists()
