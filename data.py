"""Data sets: where the images lie, which split the field uses, few-shot sampling, base and novel classes, transforms.

Everything follows CoOp and Dassl.pytorch (KaiyangZhou), so that numbers compare: the same split files, the same
few-shot images item for item, the same halves of the classes. A data set is a row of DATASETS, or a folder:

    data, template, lambda_reg = load("dtd", root="data") # Data: classes, train, val, test, split
    train, val = few_shot(data.train, data.val, shots=16, seed=1)
    base, novel = halves(data.classes)                    # labels
    for images, labels in batches(select(train, base), transform(clip, train=True), 4, seed=10): ...
"""
import hashlib
import json
import math
import os
import random
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torchvision
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

import shapes


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line: what is wrong, where, and what to do."""


class Item(NamedTuple):
    image: object                                         # a path, or a PIL image where it is rendered
    label: int


class Data(NamedTuple):
    """A data set with its split. classes: names by label (labels are ids: names may repeat)."""
    classes: list
    train: list
    val: list
    test: list
    split: str                                            # where the split comes from, for the record


class Source(NamedTuple):
    read: Callable                                        # (root, split file or None) -> Data
    template: str                                         # CoOp's hand-written prompt
    lambda_reg: float                                     # MMRL's published weight, the nearest relative's


def load(name, root="data", split=None):
    """Reads a data set. name: a row of DATASETS or a folder. split: a CoOp split file to use instead of the usual one.

    Returns Data, its template and its λ_reg. Errors: InputError, before anything is decoded.
    """
    source = DATASETS.get(name) or Source(lambda root, split: read_own(Path(name), split), "a photo of a {}.", 1.0)
    data = source.read(Path(root), split)
    for part in ("train", "test"):
        empty = set(range(len(data.classes))) - {item.label for item in getattr(data, part)}
        if empty:
            raise InputError(f"--dataset {name}: no {part} image of the class {data.classes[min(empty)]!r}; "
                             "every class needs both")
    return data, source.template, source.lambda_reg


# ------------------------------------------------------------------------------------------------------------ readers

def read_shapes(root, split):
    """The bundled demo: compositions such as "striped blue boat", rendered from a seed (see shapes.py)."""
    if split:
        raise InputError(f"--split {split}: the demo's images are rendered and take no split file")
    classes, *parts = shapes.task()
    train, test = [[Item(Image.fromarray(image), label) for image, label in part] for part in parts]
    return Data(classes, train, [], test, "rendered")


def read_dtd(root, split):
    """DTD (Cimpoi et al., CVPR 2014): found in CoOp's or torchvision's place, or downloaded through torchvision."""
    places = [root / "dtd", root / "dtd" / "dtd", root]   # torchvision nests one deeper; root may be DTD's own folder
    folder = next((place for place in places if (place / "images").is_dir()), None)
    if folder is None:
        print(f"DTD is not in {places[0]}; downloading it through torchvision (600 MB)")
        try:
            torchvision.datasets.DTD(str(root), download=True)
        except Exception as error:                        # urllib, tarfile and checksums each fail in their own way
            raise InputError(f"no DTD images: looked for {places[0] / 'images'}/<class>/*.jpg, and the download failed "
                             f"({error}); unpack robots.ox.ac.uk/~vgg/data/dtd's dtd-r1.0.1.tar.gz in {root}") from None
        folder = places[1]
    file = Path(split) if split else coop_split(folder, "split_zhou_DescribableTextures.json")
    if file is None:
        return seeded_split(folder / "images", 0.5, 0.2, "seeded (not CoOp's)")
    return read_split(file, folder / "images")


def read_own(folder, split):
    """A folder of class folders, or of train/ and test/ (or val/) with class folders in each."""
    if not folder.is_dir():
        raise InputError(f"--dataset {folder}: neither a folder nor one of {', '.join(DATASETS)}")
    if split:
        return read_split(Path(split), folder)
    test = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or test is None:
        return seeded_split(folder, 0.5, 0, "a seeded half for training, the other for testing")
    found = class_folders(folder / "train"), class_folders(test)
    classes, other = list(found[0]), sorted(found[0].keys() ^ found[1].keys())
    if other:
        raise InputError(f"{folder}: the class {other[0]!r} is in only one of train/ and {test.name}/")
    items = [[Item(path, classes.index(name)) for name, paths in part.items() for path in paths] for part in found]
    return Data(classes, items[0], [], items[1], f"the folders train and {test.name}")


def image_files(folder):
    """Every image file below a folder, sorted."""
    return sorted(path for path in folder.rglob("*")
                  if path.suffix.lower() in IMG_EXTENSIONS and not path.name.startswith("."))


def class_folders(folder):
    """{class name: its image files}, both sorted."""
    found = {}
    for place in sorted(folder.iterdir()):
        if place.is_dir() and not place.name.startswith((".", "__")):
            found[place.name] = image_files(place)
    if not found:
        raise InputError(f"{folder} holds no class folders; expected one folder per class with its images inside")
    for name, paths in found.items():
        if not paths:
            raise InputError(f"{folder / name} holds no images ({', '.join(IMG_EXTENSIONS)})")
    return found


def seeded_split(folder, train, val, name):
    """A split of our own of class folders that come with none: these shares of each class, drawn with seed 1."""
    rng, parts = random.Random(1), ([], [], [])
    found = class_folders(folder)
    for label, paths in enumerate(found.values()):
        rng.shuffle(paths)
        a, b = round(train * len(paths)), round((train + val) * len(paths))
        for part, chosen in zip(parts, (paths[:a], paths[a:b], paths[b:])):
            part += [Item(path, label) for path in chosen]
    print(f"split: {name}")
    return Data(list(found), *parts, name)


COOP_SPLITS = {                                           # name: sha256, at the pinned commit of a public repository
    "split_zhou_DescribableTextures.json": "f26ebeccd2b58e68d70f07a0dc39fe49bf7b69024bac34396b954dfd87969c38",
}
COOP_SPLITS_URL = ("https://raw.githubusercontent.com/linzhiqiu/cross_modal_adaptation/"
                   "ac9077ee4e422f768c9b9109551468605e33ec9a/splits/")


def download(url, sha256, instead):
    """A published file's bytes. Errors: OSError without a network; InputError, which says what to do `instead`."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{url} is not the file it was (sha256); {instead}")
    return content


def coop_split(folder, name):
    """CoOp's split file beside the images, downloaded and checked if it is not there. None if it cannot be had."""
    file = folder / name
    if not file.exists():
        try:
            content = download(COOP_SPLITS_URL + name, COOP_SPLITS[name], f"put a copy in {folder}")
        except OSError as error:
            print(f"cannot download CoOp's split {name} ({error}); put it in {folder} for comparable numbers")
            return None
        part = file.with_suffix(".part")
        part.write_bytes(content)
        os.replace(part, file)
    return file


def read_split(file, images):
    """CoOp's split format: {"train": [[path under `images`, label, class name], ...], "val": ..., "test": ...}."""
    try:
        split, names, items = json.loads(file.read_text(encoding="utf-8")), {}, {"train": [], "val": [], "test": []}
        for part in items:
            for path, label, name in split[part]:
                if type(label) is not int or names.setdefault(label, str(name)) != str(name):
                    raise ValueError(f"{path} has the label {label} and the class {name}")
                items[part].append(Item(images / path, label))
    except OSError as error:
        raise InputError(f"split file {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"split file {file} is not in CoOp's format ({type(error).__name__}: {error})") from None
    if sorted(names) != list(range(len(names))):
        raise InputError(f"split file {file}: labels must run from 0 without gaps, found {sorted(names)[:5]} ...")
    paths = [item.image for part in items.values() for item in part]
    if len(set(paths)) < len(paths):
        raise InputError(f"split file {file} names {Counter(paths).most_common(1)[0][0]} more than once")
    # one listing per folder: thousands of `exists` are slow on a network disk
    present = {folder / name for folder in {path.parent for path in paths} if folder.is_dir()
               for name in os.listdir(folder)}
    missing = [path for path in paths if path not in present]
    if missing:
        raise InputError(f"{len(missing)} of the {len(paths)} images that {file} names are missing, "
                         f"such as {', '.join(map(str, missing[:3]))}; looked in {images}")
    return Data([names[label] for label in sorted(names)], items["train"], items["val"], items["test"], file.name)


DATASETS = {
    # name       reader       template                  λ_reg
    "shapes": Source(read_shapes, "a photo of a {}.", 1.0),
    "dtd": Source(read_dtd, "{} texture.", 6.0),
}


# ----------------------------------------------------------------------------------------------------------- protocol

def few_shot(train, val, shots, seed):
    """Dassl's few-shot lists, item for item: one stream of random numbers, classes in first-seen order, a class with
    fewer than `shots` images whole; then the same from val with at most four."""
    rng = random.Random(seed)

    def draw(items, k):
        by_label = {}
        for item in items:
            by_label.setdefault(item.label, []).append(item)
        return [item for group in by_label.values() for item in (rng.sample(group, k) if len(group) >= k else group)]
    return draw(train, shots), draw(val, min(shots, 4))


def halves(classes):
    """CoOp's base and novel labels: the first ceil(C/2) and the rest."""
    m = math.ceil(len(classes) / 2)
    return list(range(m)), list(range(m, len(classes)))


def prompts(template, classes):
    """The texts that name the classes: {} in the template becomes the name, as CoOp writes it."""
    return [template.replace("{}", name.replace("_", " ")) for name in classes]


def select(items, labels):
    """The items of `labels`, renumbered from 0 in that order."""
    new = {label: i for i, label in enumerate(labels)}
    return [Item(item.image, new[item.label]) for item in items if item.label in new]


# ------------------------------------------------------------------------------------------------------------- images

def transform(clip, train):
    """PIL image → `[3, S, S]` for `clip`: MMRL's random resized crop and flip, or CLIP's resize and centre crop."""
    size, bicubic = clip.image_size, v2.InterpolationMode.BICUBIC
    if train:
        crop = [v2.RandomResizedCrop(size, scale=(0.5, 1), interpolation=bicubic), v2.RandomHorizontalFlip()]
    else:
        crop = [v2.Resize((size, size) if clip.squash else size, interpolation=bicubic), v2.CenterCrop(size)]
    return v2.Compose([*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(clip.mean, clip.std)])


class Images(torch.utils.data.Dataset):
    """Decoded and transformed items. seed: image i is augmented with numbers of its own, whichever worker does it."""
    def __init__(self, items, transform, seed=0):
        self.items, self.transform, self.seed = items, transform, seed

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, label = self.items[i]
        if not isinstance(image, Image.Image):
            try:
                image = Image.open(image)
                if image.mode[0] in "IF":                 # 16 bits and more: Pillow would cut them off at 255
                    raise ValueError(f"mode {image.mode}: convert it to 8 bits a channel")
                image = image.convert("RGB")
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise InputError(f"{str(self.items[i].image)!r} is not a readable image ({error})") from None
        with torch.random.fork_rng(devices=[]):           # torchvision's transforms draw from the global generator only
            torch.manual_seed(self.seed * 10**7 + i)
            return self.transform(image), label


def batches(items, transform, batch_size, seed=None, workers=0):
    """Batches of images `[B, 3, S, S]` and labels `[B]`. seed: for training: shuffles and augments, and a last small
    batch is dropped as Dassl does; None keeps order and items."""
    train = seed is not None
    return torch.utils.data.DataLoader(
        Images(items, transform, seed or 0), batch_size, shuffle=train, drop_last=train and len(items) >= batch_size,
        generator=torch.Generator().manual_seed(seed or 0), num_workers=workers, pin_memory=torch.cuda.is_available())
