"""The demo: scenes rendered from five factors, and a small CLIP pretrained on them, which the repository carries.

Neither pretrained weights nor a data set can be had without a network, so the demo brings its own. A scene is an object
of some color and texture, a white geometric shape beside it, and a location. `render` draws any number of scenes;
`pretrain` trains open_clip's own `CLIP` class on scenes and captions with CLIP's loss (Radford et al. 2021, section
2.3), so that demo/ is an OpenCLIP checkpoint by construction: `open_clip.create_model("local-dir:demo")` loads it.
`task` is the downstream task: compositions such as "striped blue boat", in a world that differs from the pretraining.

    python shapes.py                      # regenerates demo/'s weights from seed 0: about an hour on two cores
    python shapes.py --picture FILE.png   # draws the same scenes in both worlds
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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image, ImageDraw
from torchvision.utils import save_image

FACTORS = {
    "color": ("red", "orange", "yellow", "green", "turquoise", "blue", "purple", "pink"),
    "texture": ("plain", "striped", "dotted", "checkered", "zigzag", "gridded"),
    "object": ("boat", "house", "tree", "car", "fish", "cup", "rocket", "umbrella"),
    "shape": ("circle", "square", "triangle", "star", "cross", "heart", "ring", "crescent"),
    "location": ("at sea", "in the desert", "in the forest", "in the city", "in the snow", "in space"),
}
HUES = (0, 28, 56, 120, 176, 228, 276, 322)               # degrees, one per color
SIZE = 48                                                 # pixels


class World(NamedTuple):
    """How scenes look. hue: rotation of all colors, degrees. turn: of the textures, radians. lean: shear of figures."""
    hue: float = 0.0
    turn: float = 0.0
    lean: float = 0.0


PRETRAINING = World()
TASK = World(hue=36.0, turn=0.8, lean=0.35)              # three shifts, so that color, texture and figures all change

# Figures on a canvas of 100 x 100: what to draw, one over another; "-" cuts a hole.
FIGURES = {
    "boat": [("polygon", (4, 62, 96, 62, 78, 92, 22, 92)), ("polygon", (46, 6, 46, 56, 10, 56)),
             ("polygon", (54, 16, 54, 56, 88, 56))],
    "house": [("polygon", (50, 4, 98, 46, 2, 46)), ("rectangle", (14, 46, 86, 96)), ("-rectangle", (42, 66, 60, 96))],
    "tree": [("ellipse", (14, 2, 86, 66)), ("rectangle", (42, 60, 58, 98))],
    "car": [("rectangle", (2, 44, 98, 76)), ("polygon", (20, 44, 32, 18, 70, 18, 84, 44)),
            ("ellipse", (12, 62, 40, 90)), ("ellipse", (60, 62, 88, 90))],
    "fish": [("ellipse", (2, 24, 74, 76)), ("polygon", (60, 50, 98, 20, 98, 80)), ("-ellipse", (14, 38, 24, 48))],
    "cup": [("polygon", (6, 12, 70, 12, 62, 92, 14, 92)), ("ellipse", (48, 24, 96, 72)),
            ("-ellipse", (60, 36, 84, 60)), ("polygon", (6, 12, 70, 12, 62, 92, 14, 92))],
    "rocket": [("ellipse", (32, 0, 68, 60)), ("rectangle", (32, 30, 68, 78)), ("polygon", (32, 50, 10, 96, 32, 80)),
               ("polygon", (68, 50, 90, 96, 68, 80)), ("polygon", (42, 78, 58, 78, 50, 100))],
    "umbrella": [("pieslice", (2, 8, 98, 104), 180, 360), ("rectangle", (46, 56, 54, 90)),
                 ("rectangle", (28, 86, 54, 94)), ("rectangle", (28, 78, 34, 94))],
    "circle": [("ellipse", (8, 8, 92, 92))],
    "square": [("rectangle", (12, 12, 88, 88))],
    "triangle": [("polygon", (50, 6, 98, 90, 2, 90))],
    "star": [("polygon", [50 + (50, 20)[k % 2] * turn(math.pi * k / 5) for k in range(10)
                          for turn in (math.sin, lambda angle: -math.cos(angle))])],
    "cross": [("rectangle", (36, 4, 64, 96)), ("rectangle", (4, 36, 96, 64))],
    "heart": [("ellipse", (4, 8, 54, 58)), ("ellipse", (46, 8, 96, 58)), ("polygon", (9, 46, 91, 46, 50, 96))],
    "ring": [("ellipse", (4, 4, 96, 96)), ("-ellipse", (30, 30, 70, 70))],
    "crescent": [("ellipse", (8, 4, 96, 96)), ("-ellipse", (36, -2, 112, 88))],
}


# ---------------------------------------------------------------------------------------------------------- rendering

@functools.cache
def masks(names):
    """Figures as `[len(names), 2, 100, 100]` in [0, 1]: the figure, and the figure with its outline."""
    drawn = []
    for name in names:
        image = Image.new("L", (100, 100))
        draw = ImageDraw.Draw(image)
        for primitive, coordinates, *angles in FIGURES[name]:
            getattr(draw, primitive.lstrip("-"))(coordinates, *angles, fill=0 if primitive[0] == "-" else 255)
        drawn.append(torch.tensor(list(image.tobytes()), dtype=torch.float).view(1, 100, 100) / 255)
    drawn = torch.stack(drawn)
    return torch.cat([drawn, F.max_pool2d(drawn, 9, 1, 4)], dim=1)


def render(labels, generator, world=PRETRAINING):
    """Draws scenes. labels: `[B, 5]` value numbers in the order of FACTORS → uint8 images `[B, 3, SIZE, SIZE]`."""
    B, S = len(labels), 2 * SIZE                          # figures are drawn at twice the size, then averaged
    color, texture, thing, shape, location = labels.unbind(dim=1)

    def uniform(low, high):
        return torch.empty(B, 1, 1).uniform_(low, high, generator=generator)

    def place(figures, x, y, size):
        """→ figure and figure with outline, `[B, 1, S, S]` each, and the figure's own coordinates u, v, `[B, S, S]`."""
        angle = uniform(-.08, .08)
        c, s, lean = angle.cos(), angle.sin(), angle.sin() + world.lean
        affine = torch.cat([torch.cat([c, lean, -(x * c + y * lean)], 2), torch.cat([-s, c, x * s - y * c], 2)], 1)
        grid = F.affine_grid(affine / size, [B, 1, S, S], align_corners=False)
        return *F.grid_sample(figures, grid, align_corners=False).split(1, dim=1), *grid.unbind(dim=-1)

    side = torch.randint(0, 2, (B, 1, 1), generator=generator) * 2.0 - 1
    figure, outline, u, v = place(masks(FACTORS["object"])[thing], side * uniform(.26, .34), uniform(.22, .30),
                                  uniform(.6, .68))
    dark = pattern(texture, u, v, uniform(.85, 1.15), uniform(-.3, .3) + world.turn)
    rgb = torch.tensor([colorsys.hsv_to_rgb(hue / 360, .95, 1.) for hue in HUES])[color] * uniform(.8, 1.)[:, 0]
    paint, outline = F.avg_pool2d(figure * (1 - .72 * dark[:, None]), 2), F.avg_pool2d(outline, 2)
    image = background(location, uniform, generator)
    image = image * (1 - outline) + .05 * outline + rgb[:, :, None, None] * paint
    figure, outline, _, _ = place(masks(FACTORS["shape"])[shape], -side * uniform(.54, .60), uniform(-.6, -.54),
                                  uniform(.36, .40))
    figure, outline = F.avg_pool2d(figure, 2), F.avg_pool2d(outline, 2)
    image = image * (1 - outline) + .05 * outline + .92 * figure
    image = torch.einsum("dc,bcyx->bdyx", hue_rotation(world.hue), image)              # as through a tinted lens
    image = image + .02 * torch.randn(image.shape, generator=generator)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def pattern(texture, u, v, fineness, turn):
    """How dark each point of an object's own coordinates u, v `[B, S, S]` is: 0 or 1."""
    w = 4.4 * math.pi * fineness
    u, v = w * (u * turn.cos() + v * turn.sin()), w * (v * turn.cos() - u * turn.sin())
    draw = {"plain": lambda u, v: torch.zeros_like(u),
            "striped": lambda u, v: v.sin() > 0,
            "dotted": lambda u, v: u.cos() + v.cos() > .7,
            "checkered": lambda u, v: (.6 * u).sin() * (.6 * v).sin() > 0,
            "zigzag": lambda u, v: (v + 5.8 * (.19 * u % 1 - .5).abs()).sin() > 0,
            "gridded": lambda u, v: torch.maximum(u.cos(), v.cos()) > .75}
    dark = torch.zeros_like(u)
    for k, name in enumerate(FACTORS["texture"]):
        dark[texture == k] = draw[name](u[texture == k], v[texture == k]).float()
    return dark


def background(location, uniform, generator):
    """The location, `[B, 3, SIZE, SIZE]`, in muted tones, so that it says nothing of the object's color."""
    B = len(location)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij")
    horizon, phase = uniform(-.15, .25), uniform(0, 6.28)
    columns = F.interpolate(torch.rand(B, 1, 1, 12, generator=generator), (SIZE, SIZE))[:, 0]
    flakes = F.interpolate((torch.rand(B, 1, 24, 24, generator=generator) > .93).float(), (SIZE, SIZE))[:, 0]
    ground, houses, everywhere = y > horizon, y > horizon - .9 * columns, torch.ones(B, SIZE, SIZE)
    dunes, trunks = y > horizon + .15 * (3 * x + phase).sin(), (11 * x + phase).sin() > .25
    waves = ground & ((40 * y + 2 * (4 * x + phase).sin()).sin() > 0)
    windows = houses & ((24 * x).sin() > .2) & ((24 * y).sin() > .2)
    layers = {                                            # (where, rgb), each over the ones before
        "at sea": ((everywhere, (.78, .82, .86)), (ground, (.36, .46, .56)), (waves, (.5, .6, .68))),
        "in the desert": ((everywhere, (.80, .84, .86)), (dunes, (.80, .70, .54))),
        "in the forest": ((everywhere, (.28, .36, .27)), (trunks, (.42, .34, .26)), (ground, (.35, .40, .29))),
        "in the city": ((everywhere, (.70, .70, .74)), (houses, (.44, .44, .48)), (windows, (.76, .74, .62))),
        "in the snow": ((everywhere, (.72, .75, .80)), (ground, (.95, .96, .98)), (flakes, (1., 1., 1.))),
        "in space": ((everywhere, (.17, .17, .26)), (flakes, (.85, .85, .8))),
    }
    image = torch.zeros(B, 3, SIZE, SIZE)
    for k, name in enumerate(FACTORS["location"]):
        here = location == k
        for where, rgb in layers[name]:
            image[here] = torch.lerp(image[here], torch.tensor(rgb)[:, None, None], where[here, None].float())
    return image


def hue_rotation(degrees):
    """Rotation `[3, 3]` of RGB about the gray axis (Rodrigues)."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    k = torch.tensor([[0., -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    return c * torch.eye(3) + s * k + (1 - c) / 3


# ---------------------------------------------------------------------------------------------------- downstream task

def task(train=16, test=20, seed=7):
    """The downstream task: 48 compositions of texture, color and object, in another world than the pretraining's.

    24 base classes, then 24 novel ones; in either half each color, texture and object occurs equally often, and no
    composition occurs twice. Returns the class names, and for train and test (numbers: images per class) a list of
    (uint8 array `[SIZE, SIZE, 3]`, label, {factor: value}).
    """
    rng, classes = random.Random(seed), []
    counts = [len(FACTORS[factor]) for factor in ("texture", "color", "object")]
    while len(classes) < 48:
        half = list(zip(*[rng.sample([k for k in range(n) for _ in range(24 // n)], 24) for n in counts]))
        if len(set(classes + half)) == len(classes) + 24:
            classes += half
    names = [f"{FACTORS['texture'][t]} {FACTORS['color'][c]} {FACTORS['object'][o]}" for t, c, o in classes]
    parts = []
    for number, per_class in ((0, train), (2, test)):     # numbers that seed them: others would be other images
        generator = torch.Generator().manual_seed(10 * seed + number)
        labels = torch.arange(48).repeat_interleave(per_class)
        texture, color, thing = torch.tensor(classes)[labels].unbind(dim=1)
        shape, location = [torch.randint(len(FACTORS[factor]), labels.shape, generator=generator)
                           for factor in ("shape", "location")]
        drawn = torch.stack([color, texture, thing, shape, location], dim=1)
        images = rearrange(render(drawn, generator, TASK), "b c y x -> b y x c").numpy()
        scenes = [{factor: FACTORS[factor][k] for factor, k in zip(FACTORS, row)} for row in drawn.tolist()]
        parts.append(list(zip(images, labels.tolist(), scenes)))
    return names, *parts


# -------------------------------------------------------------------------------------------------------- pretraining

CONFIG = {"embed_dim": 128,
          "vision_cfg": {"image_size": SIZE, "patch_size": 8, "layers": 8, "width": 128, "head_width": 16},
          "text_cfg": {"context_length": 24, "vocab_size": 49408, "layers": 6, "width": 64, "heads": 4}}
MEAN, STD = (.48145466, .4578275, .40821073), (.26862954, .26130258, .27577711)        # OpenAI CLIP's
ALONE = {                                                 # how a caption speaks of one factor alone
    "color": ("something {}", "a {} color", "an image in {}", "a {} thing"),
    "texture": ("a {} pattern", "a {} surface", "a {} texture", "a {} thing"),
    "object": ("a {}", "the {}", "one {}"),
    "shape": ("a {} shape", "a white {}", "a {} sign"),
    "location": ("a scene {}", "a picture taken {}", "somewhere {}", "{}"),
}


def caption(words, told, rng):
    """One caption. words: the scene's five words; told: which of the five it mentions."""
    say = dict(zip(FACTORS, words))
    told = [factor for factor, use in zip(FACTORS, told) if use]
    if len(told) == 1:
        text = rng.choice(ALONE[told[0]]).format(say[told[0]])
    else:
        noun = say["object"] if "object" in told else "thing"
        text = " ".join(["a"] + [say[factor] for factor in ("texture", "color") if factor in told] + [noun])
        text += f" with a {say['shape']}" if "shape" in told else ""
        text += f" {say['location']}" if "location" in told else ""
    return rng.choice(("", "", "a photo of ", "a picture of ")) + text + rng.choice(("", "."))


def batch(rng, groups=42):
    """Labels `[B, 5]`, which factors each caption tells `[B, 5]`, and B captions.

    Scenes come in groups that differ in one factor alone, for which the group's captions are the negatives: in batches
    drawn freely color tells almost every pair apart, and shapes are learned last.
    """
    values = list(FACTORS.values())
    smallest, labels, told = min(map(len, values)), [], []
    for g in range(groups):
        group = torch.tensor([rng.randrange(len(words)) for words in values]).repeat(smallest, 1)
        group[:, g % 5] = torch.tensor(rng.sample(range(len(values[g % 5])), smallest))
        labels.append(group)
        alone = rng.random() < .25
        told += [[f == g % 5 or (not alone and rng.random() < .7) for f in range(5)] for _ in group]
    labels = torch.cat(labels)
    words = [[values[f][k] for f, k in enumerate(row)] for row in labels.tolist()]
    return labels, torch.tensor(told), [caption(scene, use, rng) for scene, use in zip(words, told)]


def contrastive_loss(image_features, text_features, scale, labels, told):
    """CLIP's symmetric loss, without the negatives that are none: other captions that also hold for the image."""
    holds = ((labels[:, None] == labels[None]) | ~told[None]).all(dim=2)               # [image, caption]
    logits = scale * image_features @ text_features.T
    logits = logits.masked_fill(holds & ~torch.eye(len(labels), dtype=torch.bool), -torch.inf)
    target = torch.arange(len(labels))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def normalize(images):
    return (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def pretrain(folder, steps=3000, seed=0):
    """Trains the small CLIP and writes it to folder/ in OpenCLIP's format and half precision, saving as it goes."""
    import open_clip                                      # not needed to render
    from safetensors.torch import save_file
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    torch.manual_seed(seed)                               # open_clip initialises from the global generator
    model = open_clip.CLIP(**CONFIG)
    tokenizer = open_clip.SimpleTokenizer(context_length=CONFIG["text_cfg"]["context_length"])
    weights, others = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": .1}, {"params": others, "weight_decay": 0}],
                                  lr=1e-3, betas=(.9, .98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 200, .5 + .5 * math.cos(math.pi * step / steps)))
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "open_clip_model.safetensors.tmp"     # takes the weights' place at the end
    started = time.time()
    for step in range(1, steps + 1):
        labels, told, captions = batch(rng)
        image_features, text_features, scale = model(normalize(render(labels, generator)), tokenizer(captions))
        loss = contrastive_loss(image_features, text_features, scale, labels, told)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.logit_scale.data.clamp_(max=math.log(100))  # as CLIP does
        if step % 25 == 0:
            seconds = time.time() - started
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {step * len(labels) / seconds:.0f} images/s  "
                  f"{seconds / step * (steps - step) / 60:.0f} minutes to go", flush=True)
        if step % 250 == 0 or step == steps:
            found = accuracy(model, tokenizer)
            print("   ", "  ".join(f"{name} {value:.1f} %" for name, value in found.items()), flush=True)
            save_file({key: value.half().contiguous() for key, value in model.state_dict().items()}, part)
    config = folder / "open_clip_config.json.tmp"
    config.write_text(json.dumps({"model_cfg": CONFIG}, indent=1))
    for file in (part, config):
        os.replace(file, file.with_suffix(""))


@torch.no_grad()
def accuracy(model, tokenizer, n=1000):
    """Zero-shot accuracy on fresh scenes: of each factor by name, and of the 384 names "texture color object"."""
    generator = torch.Generator().manual_seed(10**6)
    labels = torch.stack([torch.randint(0, len(v), (n,), generator=generator) for v in FACTORS.values()], 1)
    features = model.encode_image(normalize(render(labels, generator)), normalize=True)

    def right(texts, target):
        text_features = model.encode_text(tokenizer(texts), normalize=True)
        return 100 * ((features @ text_features.T).argmax(dim=1) == target).float().mean()
    found = {factor: right([ALONE[factor][0].format(value) for value in values], labels[:, f])
             for f, (factor, values) in enumerate(FACTORS.items())}
    names = ["a photo of a {} {} {}.".format(*words)
             for words in itertools.product(FACTORS["texture"], FACTORS["color"], FACTORS["object"])]
    color, texture, thing = labels[:, :3].unbind(dim=1)
    number = (texture * len(FACTORS["color"]) + color) * len(FACTORS["object"]) + thing
    return {**found, f"all {len(names)} names": right(names, number)}


def picture(file, columns=12):
    """Draws the same scenes in the world of the pretraining (above) and in that of the task (below)."""
    rng = random.Random(0)
    labels = torch.tensor([[rng.randrange(len(values)) for values in FACTORS.values()] for _ in range(columns)])
    rows = [render(labels, torch.Generator().manual_seed(0), world) for world in (PRETRAINING, TASK)]
    grid = F.interpolate(torch.cat(rows), scale_factor=2)  # nearest: the pixels stay what CLIP sees
    save_image(grid / 255, file, nrow=columns, pad_value=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", metavar="FILE.png", help="draw both worlds instead of pretraining")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().with_name("demo"), help="to write to")
    args = parser.parse_args()
    try:
        picture(args.picture) if args.picture else pretrain(args.folder)
    except (OSError, ValueError) as error:                # Pillow: a suffix that is no image's
        parser.exit(2, f"shapes.py: error: {error}\n")
