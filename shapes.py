"""The demo's world: scenes rendered from five factors, and the small CLIP pretrained on them.

Neither pretrained weights nor data sets fit in a repository, so the demo brings its own. A scene is one object of some
color and texture, one geometric shape beside it, and a location; `render` draws any number of them from a generator.
`pretrain` trains open_clip's own `CLIP` class on such scenes and captions (Radford et al. 2021, section 2.3), so the
result is an OpenCLIP checkpoint by construction: `open_clip.create_model("local-dir:demo")` loads it.

    python shapes.py                  # regenerates demo/ from seed 0
    python shapes.py --picture FILE   # draws both worlds: what CLIP was pretrained on, what the downstream task shows
"""
import argparse
import colorsys
import functools
import itertools
import json
import math
import os
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image, ImageDraw

FACTORS = {
    "color": ("red", "orange", "yellow", "green", "turquoise", "blue", "purple", "pink"),
    "texture": ("plain", "striped", "dotted", "checkered", "zigzag", "gridded"),
    "object": ("boat", "house", "tree", "car", "fish", "cup", "rocket", "umbrella"),
    "shape": ("circle", "square", "triangle", "star", "cross", "heart", "ring", "crescent"),
    "location": ("at sea", "in the desert", "in the forest", "in the city", "in the snow", "in space"),
}
HUES = (0, 28, 56, 120, 176, 228, 276, 322)                                       # degrees, one per color
SIZE = 48                                                                         # pixels
WORLD = dict(hue=0.0, lean=0.0, fineness=1.0, noise=0.0)                          # what CLIP is pretrained on
TASK_WORLD = dict(hue=45.0, lean=0.0, fineness=1.0, noise=0.0)                    # what the downstream task shows

# Silhouettes on a 100 x 100 canvas: (primitive, coordinates), "-" cuts a hole.
SILHOUETTES = {
    "boat": [("polygon", (4, 62, 96, 62, 78, 92, 22, 92)), ("polygon", (46, 6, 46, 56, 10, 56)), ("polygon", (54, 16, 54, 56, 88, 56))],
    "house": [("polygon", (50, 4, 98, 46, 2, 46)), ("rectangle", (14, 46, 86, 96)), ("-rectangle", (42, 66, 60, 96))],
    "tree": [("ellipse", (14, 2, 86, 66)), ("rectangle", (42, 60, 58, 98))],
    "car": [("rectangle", (2, 44, 98, 76)), ("polygon", (20, 44, 32, 18, 70, 18, 84, 44)), ("ellipse", (12, 62, 40, 90)), ("ellipse", (60, 62, 88, 90))],
    "fish": [("ellipse", (2, 24, 74, 76)), ("polygon", (60, 50, 98, 20, 98, 80)), ("-ellipse", (14, 38, 24, 48))],
    "cup": [("polygon", (6, 12, 70, 12, 62, 92, 14, 92)), ("ellipse", (48, 24, 96, 72)), ("-ellipse", (60, 36, 84, 60)), ("polygon", (6, 12, 70, 12, 62, 92, 14, 92))],
    "rocket": [("ellipse", (32, 0, 68, 60)), ("rectangle", (32, 30, 68, 78)), ("polygon", (32, 50, 10, 96, 32, 80)), ("polygon", (68, 50, 90, 96, 68, 80)), ("polygon", (42, 78, 58, 78, 50, 100))],
    "umbrella": [("pieslice", (2, 8, 98, 104), 180, 360), ("rectangle", (46, 56, 54, 90)), ("rectangle", (28, 86, 54, 94)), ("rectangle", (28, 78, 34, 94))],
    "circle": [("ellipse", (8, 8, 92, 92))],
    "square": [("rectangle", (12, 12, 88, 88))],
    "triangle": [("polygon", (50, 6, 98, 90, 2, 90))],
    "star": [("polygon", tuple(50 + r * f(math.pi * k / 5) for k in range(10) for r in ((50, 20)[k % 2],)
                               for f in (math.sin, lambda a: -math.cos(a))))],
    "cross": [("rectangle", (36, 4, 64, 96)), ("rectangle", (4, 36, 96, 64))],
    "heart": [("ellipse", (4, 8, 54, 58)), ("ellipse", (46, 8, 96, 58)), ("polygon", (9, 46, 91, 46, 50, 96))],
    "ring": [("ellipse", (4, 4, 96, 96)), ("-ellipse", (30, 30, 70, 70))],
    "crescent": [("ellipse", (8, 4, 96, 96)), ("-ellipse", (36, -2, 112, 88))],
}


@functools.cache
def silhouettes(names):
    """Masks `[len(names), 2, 100, 100]` in [0, 1]: the figure, and the figure with its outline."""
    masks = []
    for name in names:
        image = Image.new("L", (100, 100))
        draw = ImageDraw.Draw(image)
        for primitive, coordinates, *angles in SILHOUETTES[name]:
            getattr(draw, primitive.lstrip("-"))(coordinates, *angles, fill=0 if primitive[0] == "-" else 255)
        masks.append(torch.tensor(list(image.tobytes()), dtype=torch.float).view(1, 100, 100) / 255)
    masks = torch.stack(masks)
    return torch.cat([masks, F.max_pool2d(masks, 9, 1, 4)], 1)


def render(labels, generator, world=WORLD):
    """Draws scenes. labels: `[B, 5]` value numbers in the order of FACTORS → uint8 images `[B, 3, SIZE, SIZE]`."""
    B, S = len(labels), 2 * SIZE                                                   # figures are drawn at twice the size, then averaged
    color, texture, thing, shape, location = labels.unbind(1)

    def uniform(low, high):
        return torch.empty(B, 1, 1).uniform_(low, high, generator=generator)

    def place(names, choice, x, y, size):                                          # → mask, with outline [B, 1, S, S], own coordinates [B, S, S]
        angle = uniform(-.08, .08)
        c, s = angle.cos(), angle.sin()
        turned = torch.cat([torch.cat([c, s + world["lean"], -(x * c + y * (s + world["lean"]))], 2),
                            torch.cat([-s, c, x * s - y * c], 2)], 1) / size
        grid = F.affine_grid(turned, [B, 1, S, S], align_corners=False)
        mask = F.grid_sample(silhouettes(names)[choice], grid, align_corners=False)
        return *mask.split(1, 1), *grid.unbind(-1)

    side = torch.randint(0, 2, (B, 1, 1), generator=generator) * 2.0 - 1
    mask, outline, u, v = place(tuple(FACTORS["object"]), thing, side * uniform(.26, .34), uniform(.22, .30), uniform(.6, .68))
    dark = _pattern(texture, u, v, world["fineness"] * uniform(.85, 1.15), uniform(-.3, .3))
    rgb = torch.tensor([colorsys.hsv_to_rgb(h / 360, .95, 1.) for h in HUES])[color] * uniform(.8, 1.)[:, 0]
    paint, outline = F.avg_pool2d(mask * (1 - .72 * dark[:, None]), 2), F.avg_pool2d(outline, 2)
    image = _background(location, uniform, generator)
    image = image * (1 - outline) + .05 * outline + rgb[:, :, None, None] * paint
    mask, outline, _, _ = place(tuple(FACTORS["shape"]), shape, -side * uniform(.54, .60), uniform(-.6, -.54), uniform(.36, .40))
    mask, outline = F.avg_pool2d(mask, 2), F.avg_pool2d(outline, 2)
    image = image * (1 - outline) + .05 * outline + .92 * mask
    image = torch.einsum("dc,bchw->bdhw", _hue_rotation(world["hue"]), image)      # as through a tinted lens
    image = image + (.02 + world["noise"]) * torch.randn(image.shape, generator=generator)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def _pattern(texture, u, v, fineness, turn):
    """How dark each point of an object's own coordinates u, v `[B, S, S]` is, 0 or 1."""
    w = 2 * math.pi * 2.2 * fineness
    u, v = w * (u * turn.cos() + v * turn.sin()), w * (v * turn.cos() - u * turn.sin())
    patterns = {"plain": lambda u, v: torch.zeros_like(u), "striped": lambda u, v: v.sin() > 0,
                "dotted": lambda u, v: u.cos() + v.cos() > .7, "checkered": lambda u, v: (.6 * u).sin() * (.6 * v).sin() > 0,
                "zigzag": lambda u, v: (v + 5.8 * (.19 * u % 1 - .5).abs()).sin() > 0,
                "gridded": lambda u, v: torch.maximum(u.cos(), v.cos()) > .75}
    dark = torch.zeros_like(u)
    for k, name in enumerate(FACTORS["texture"]):
        dark[texture == k] = patterns[name](u[texture == k], v[texture == k]).float()
    return dark


def _background(location, uniform, generator):
    """The location `[B, 3, SIZE, SIZE]`, in muted tones, so that it says nothing of the object's color."""
    B = len(location)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij")
    horizon, phase = uniform(-.15, .25), uniform(0, 6.28)
    columns = F.interpolate(torch.rand(B, 1, 1, 12, generator=generator), (SIZE, SIZE))[:, 0]
    flakes = F.interpolate((torch.rand(B, 1, 24, 24, generator=generator) > .93).float(), (SIZE, SIZE))[:, 0]
    ground, house = y > horizon, y > horizon - .9 * columns
    window = house & ((24 * x).sin() > .2) & ((24 * y).sin() > .2)
    everywhere = torch.ones(B, SIZE, SIZE)
    layers = {                                                                     # (where, rgb), each over the ones before
        "at sea": ((everywhere, (.78, .82, .86)), (ground, (.36, .46, .56)), (ground & ((40 * y + 2 * (4 * x + phase).sin()).sin() > 0), (.5, .6, .68))),
        "in the desert": ((everywhere, (.80, .84, .86)), (y > horizon + .15 * (3 * x + phase).sin(), (.80, .70, .54))),
        "in the forest": ((everywhere, (.28, .36, .27)), ((11 * x + phase).sin() > .25, (.42, .34, .26)), (ground, (.35, .40, .29))),
        "in the city": ((everywhere, (.70, .70, .74)), (house, (.44, .44, .48)), (window, (.76, .74, .62))),
        "in the snow": ((everywhere, (.72, .75, .80)), (ground, (.95, .96, .98)), (flakes, (1., 1., 1.))),
        "in space": ((everywhere, (.17, .17, .26)), (flakes, (.85, .85, .8))),
    }
    image = torch.zeros(B, 3, SIZE, SIZE)
    for k, name in enumerate(FACTORS["location"]):
        here = location == k
        for where, rgb in layers[name]:
            image[here] = torch.lerp(image[here], torch.tensor(rgb)[:, None, None], where[here, None].float())
    return image


def _hue_rotation(degrees):
    """Rotation `[3, 3]` of RGB about the gray axis (Rodrigues)."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    k = torch.tensor([[0., -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    return c * torch.eye(3) + s * k + (1 - c) / 3
def task(train=16, val=4, test=20, seed=7):
    """The downstream task: 48 compositions of texture, color and object ("striped blue boat"), in another world.

    24 base classes, then 24 novel ones; each color, texture and object occurs equally often in either half, each
    composition once. Returns class names, and for train, val and test a list of (uint8 array `[SIZE, SIZE, 3]`, label).
    """
    rng = random.Random(seed)
    classes = []
    while len(classes) < 48:
        columns = [rng.sample([k for k in range(n) for _ in range(24 // n)], 24) for n in (6, 8, 8)]
        half = list(zip(*columns))
        if len(set(classes + half)) == len(classes) + 24:
            classes += half
    names = [f"{FACTORS['texture'][t]} {FACTORS['color'][c]} {FACTORS['object'][o]}" for t, c, o in classes]
    parts = []
    for number, per_class in enumerate((train, val, test)):
        generator = torch.Generator().manual_seed(seed * 10 + number)
        labels = torch.arange(48).repeat_interleave(per_class)
        texture, color, thing = torch.tensor(classes)[labels].unbind(1)
        others = [torch.randint(0, len(FACTORS[f]), labels.shape, generator=generator) for f in ("shape", "location")]
        images = render(torch.stack([color, texture, thing, *others], 1), generator, TASK_WORLD)
        parts.append(list(zip(rearrange(images, "b c y x -> b y x c").numpy(), labels.tolist())))
    return names, *parts


CONFIG = dict(embed_dim=128,
              vision_cfg=dict(image_size=SIZE, patch_size=8, layers=8, width=128, head_width=16),
              text_cfg=dict(context_length=24, vocab_size=49408, layers=6, width=64, heads=4))
MEAN, STD = (.48145466, .4578275, .40821073), (.26862954, .26130258, .27577711)    # OpenAI CLIP's, which every loader assumes
SINGLE = {                                                                         # how a caption speaks of one factor alone
    "color": ("something {}", "a {} color", "an image in {}", "a {} thing"),
    "texture": ("a {} pattern", "a {} surface", "a {} texture", "a {} thing"),
    "object": ("a {}", "the {}", "one {}"),
    "shape": ("a {} shape", "a white {}", "a {} sign"),
    "location": ("a scene {}", "a picture taken {}", "somewhere {}", "{}"),
}


def caption(words, named, rng):
    """One caption. words: the scene's five words; named: which of them it may use."""
    say = dict(zip(FACTORS, words))
    told = [factor for factor, use in zip(FACTORS, named) if use]
    if len(told) == 1:
        text = rng.choice(SINGLE[told[0]]).format(say[told[0]])
    else:
        text = " ".join(["a"] + [say[f] for f in ("texture", "color") if f in told] + [say["object"] if "object" in told else "thing"])
        text += f" with a {say['shape']}" if "shape" in told else ""
        text += f" {say['location']}" if "location" in told else ""
    return rng.choice(("", "", "a photo of ", "a picture of ")) + text + rng.choice(("", "."))


def batch(generator, rng, groups=42):
    """Scenes in groups that differ in one factor only (otherwise the loss is content with color, the easiest), and captions.

    Returns labels `[B, 5]`, named `[B, 5]` (the factors a caption mentions) and B captions."""
    labels, named = [], []
    sizes = [len(values) for values in FACTORS.values()]
    for g in range(groups):
        group = torch.tensor([rng.randrange(n) for n in sizes]).repeat(min(sizes), 1)
        group[:, g % 5] = torch.tensor(rng.sample(range(sizes[g % 5]), min(sizes)))
        labels.append(group)
        alone = rng.random() < .25
        named += [[f == g % 5 or (not alone and rng.random() < .7) for f in range(5)] for _ in group]
    labels, named = torch.cat(labels), torch.tensor(named)
    values = list(FACTORS.values())
    return labels, named, [caption([values[f][k] for f, k in enumerate(row)], use, rng) for row, use in zip(labels.tolist(), named.tolist())]


def contrastive_loss(image_features, text_features, scale, labels, named):
    """CLIP's symmetric loss, without the negatives that are none: other captions that also hold for the image."""
    holds = ((labels[:, None] == labels[None]) | ~named[None]).all(2)                # [image, caption]
    logits = scale * image_features @ text_features.T
    logits = logits.masked_fill(holds & ~torch.eye(len(labels), dtype=torch.bool), -torch.inf)
    target = torch.arange(len(labels))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def normalize(images):
    return (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def pretrain(folder, steps, seed):
    import open_clip
    from safetensors.torch import save_file
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    torch.manual_seed(seed)                                                        # open_clip initialises from the global generator
    model = open_clip.CLIP(**CONFIG)
    tokenizer = open_clip.SimpleTokenizer(context_length=CONFIG["text_cfg"]["context_length"])
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=.1), dict(params=rest, weight_decay=0)], lr=1e-3, betas=(.9, .98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 200, .5 + .5 * math.cos(math.pi * s / steps)))
    started = time.time()
    for step in range(steps):
        labels, named, captions = batch(generator, rng)
        images = normalize(render(labels, generator))
        image_features, text_features, scale = model(images, tokenizer(captions))
        loss = contrastive_loss(image_features, text_features, scale, labels, named)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.logit_scale.data.clamp_(max=math.log(100))
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.3f} {(step + 1) * len(labels) / (time.time() - started):.0f} images/s", flush=True)
        if step % 250 == 249 or step == steps - 1:
            factor_accuracy(model, tokenizer)
            Path(folder).mkdir(exist_ok=True)
            save_file({k: v.half().contiguous() for k, v in model.state_dict().items()}, f"{folder}/open_clip_model.safetensors.part")
            os.replace(f"{folder}/open_clip_model.safetensors.part", f"{folder}/open_clip_model.safetensors")
            Path(f"{folder}/open_clip_config.json").write_text(json.dumps(dict(model_cfg=CONFIG), indent=1))


@torch.no_grad()
def factor_accuracy(model, tokenizer, n=1000):
    generator = torch.Generator().manual_seed(10**6)
    labels = torch.stack([torch.randint(0, len(v), (n,), generator=generator) for v in FACTORS.values()], 1)
    features = model.encode_image(normalize(render(labels, generator)), normalize=True)
    out = []
    for f, (factor, values) in enumerate(FACTORS.items()):
        text = model.encode_text(tokenizer([SINGLE[factor][0].format(v) for v in values]), normalize=True)
        out.append(f"{factor} {100 * ((features @ text.T).argmax(1) == labels[:, f]).float().mean():.1f}")
    names = ["a photo of a {} {} {}.".format(*n) for n in itertools.product(FACTORS["texture"], FACTORS["color"], FACTORS["object"])]
    text = model.encode_text(tokenizer(names), normalize=True)
    target = (labels[:, 1] * 8 + labels[:, 0]) * 8 + labels[:, 2]
    out.append(f"texture-color-object of 384 {100 * ((features @ text.T).argmax(1) == target).float().mean():.1f}")
    print("   ", " · ".join(out), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--folder", default="demo")
    args = parser.parse_args()
    pretrain(args.folder, args.steps, 0)
