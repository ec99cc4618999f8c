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
import re
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import open_clip
import scipy.io
import torch
import torchvision
from PIL import Image
from timm.data import ImageNetInfo
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
    train: list                                           # empty for the targets of domain generalization
    val: list
    test: list
    split: str                                            # where the split comes from, for the record


class Source(NamedTuple):
    """A row of DATASETS."""
    folders: tuple                                        # below --data-root: CoOp's, then where torchvision puts it
    images: str                                           # the folder in it that a split's paths start from
    sizes: tuple                                          # classes, training, validation and test images
    template: str                                         # CoOp's hand-written prompt
    lambda_reg: float                                     # MMRL's published weight, the nearest relative's
    obtain: str                                           # the class of torchvision that downloads it, or what to do
    read: Callable                                        # (folder, images) -> Data


def load(name, root="data", split=None):
    """Reads a data set. name: "shapes", a row of DATASETS or a folder. split: a CoOp split file to use instead of the
    usual one. Returns Data, its template and its λ_reg. Errors: InputError, before anything is decoded.
    """
    source = DATASETS.get(name)
    if source:
        data, own = read_known(name, source, Path(root), split), (source.template, source.lambda_reg)
    else:
        data, own = read_shapes(split) if name == "shapes" else read_own(Path(name), split), ("a photo of a {}.", 1.0)
    for part in ("test",) if name in VARIANTS else ("train", "test"):
        empty = set(range(len(data.classes))) - {item.label for item in getattr(data, part)}
        if empty:
            raise InputError(f"--dataset {name}: no {part} image of the class {data.classes[min(empty)]!r}; "
                             "every class needs both")
    return data, *own


def read_known(name, source, root, split):
    """A row of DATASETS: found or downloaded, its split read and its files counted."""
    places = [root / folder for folder in source.folders]
    folder = next((place for place in places if (place / source.images).is_dir()), None)
    downloads = source.obtain in dir(torchvision.datasets)
    how = (BY_HAND.format(f"where torchvision.datasets.{source.obtain} downloads them") if downloads
           else source.obtain)
    if folder is None and downloads:
        print(f"{name} is not in {places[0] / source.images}; downloading it through torchvision", flush=True)
        try:
            getattr(torchvision.datasets, source.obtain)(str(root), download=True)
            folder = places[-1]
        except Exception as error:                        # urllib, tarfile and checksums each fail in their own way
            print(f"the download failed ({error})")
    if folder is None:
        there = next((place for place in (places[0], root) if place.is_dir()), None)
        found = f"{there} holds {listing(there)}" if there else f"there is no folder {root}"
        raise InputError(f"--dataset {name}: no images in {places[0] / source.images} ({found}); expected "
                         f"{sum(source.sizes[1:])} images of {source.sizes[0]} classes there: {how}")
    images = folder / source.images
    file = Path(split) if split else next(iter(sorted(folder.glob("split_zhou_*.json"))), None)
    try:
        data = read_split(file, images) if file else source.read(folder, images)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"--dataset {name}: {error.strerror}: {error.filename}; {folder} holds {listing(folder)}; "
                         f"expected the official annotation files there: {how}") from None
    except Exception as error:                            # scipy's and our own, whatever the bytes make them raise
        raise InputError(f"--dataset {name}: the annotation files in {folder} are not the official ones "
                         f"({type(error).__name__}: {error})") from None
    found = (len(data.classes), len(data.train), len(data.val), len(data.test))
    if not split and found != source.sizes:
        what = ("{} classes, {} training, {} validation and {} test images".format(*counts)
                for counts in (found, source.sizes))
        raise InputError(f"--dataset {name}: {folder} ({data.split}) gives {next(what)}; expected {next(what)}. "
                         "Complete it, or name a split of your own with --split FILE")
    return data


def listing(folder, most=5):
    names = sorted(os.listdir(folder))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"


def assemble(images, train, val, test, split):
    """Data from lists of (path under `images`, label, class name), checked: labels, names, and every file."""
    names, parts = {}, []
    for part in (train, val, test):
        parts.append([])
        for path, label, name in part:
            if type(label) is not int or names.setdefault(label, str(name)) != str(name):
                raise InputError(f"{split}: {path} has the label {label} and the class {name}")
            parts[-1].append(Item(images / path, label))
    if sorted(names) != list(range(len(names))):
        raise InputError(f"{split}: labels must run from 0 without gaps, found {sorted(names)[:5]} ...")
    paths = [item.image for part in parts for item in part]
    if len(set(paths)) < len(paths):
        raise InputError(f"{split} names {Counter(paths).most_common(1)[0][0]} more than once")
    # one listing per folder: thousands of `exists` are slow on a network disk
    present = {folder / name for folder in {path.parent for path in paths} if folder.is_dir()
               for name in os.listdir(folder)}
    missing = [path for path in paths if path not in present]
    if missing:
        raise InputError(f"{len(missing)} of the {len(paths)} images of {split} are missing, "
                         f"such as {', '.join(map(str, missing[:3]))}; looked in {images}")
    return Data([names[label] for label in sorted(names)], *parts, split)


# --------------------------------------------------------------------------------------------- splits made from lists

REGENERATED = "CoOp's, made again from the official lists"
OFFICIAL = "official"


def by_label(items):
    """{label: its items}, both in the order of the list. Items: (image, label, ...)."""
    groups = {}
    for item in items:
        groups.setdefault(item[1], []).append(item)
    return groups


def carve(trainval):
    """CoOp's train and val of an official training list: each class shuffled with seed 1, the first fifth is val."""
    rng, train, val = random.Random(1), [], []
    for group in by_label(trainval).values():
        rng.shuffle(group)
        n = round(0.2 * len(group))
        val, train = val + group[:n], train + group[n:]
    return train, val


def shares(items, train=0.5, val=0.2):
    """CoOp's train, val and test of one list: 50, 20 and 30 % of each class, shuffled with seed 1."""
    rng, parts = random.Random(1), ([], [], [])
    for group in by_label(items).values():
        rng.shuffle(group)
        a = round(train * len(group))
        b = a + round(val * len(group))
        for part, chosen in zip(parts, (group[:a], group[a:b], group[b:])):
            part += chosen
    return parts


# ------------------------------------------------------------------------------------------------------------ readers

def loadmat(file):
    with open(file, "rb") as stream:
        try:
            return scipy.io.loadmat(stream, simplify_cells=True)
        except Exception as error:                        # which names no file
            raise ValueError(f"{file.name}: {error}") from None


def lines(file):
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_pets(folder, images):
    def read(name):                                       # "Abyssinian_100 1 1 1": image, class, species, breed
        for image, label, *_ in map(str.split, lines(folder / "annotations" / name)):
            yield f"{image}.jpg", int(label) - 1, image.rpartition("_")[0].lower()
    return assemble(images, *carve(read("trainval.txt")), read("test.txt"), REGENERATED)


def read_cars(folder, images):
    names = [str(name).split() for name in loadmat(folder / "devkit" / "cars_meta.mat")["class_names"]]

    def read(file, part):                                 # "Audi TTS Coupe 2012" becomes "2012 Audi TTS Coupe"
        for car in loadmat(file)["annotations"]:
            *rest, year = names[car["class"] - 1]
            yield f"{part}/{car['fname']}", int(car["class"]) - 1, " ".join([year, *rest])
    return assemble(images, *carve(read(folder / "devkit" / "cars_train_annos.mat", "cars_train")),
                    read(folder / "cars_test_annos_withlabels.mat", "cars_test"), REGENERATED)


def read_flowers(folder, images):
    names = [name.rstrip("?") for name in torchvision.datasets.Flowers102.classes]     # then CoOp's cat_to_name.json
    labels = (loadmat(folder / "imagelabels.mat")["labels"] - 1).tolist()
    return assemble(images, *shares([(f"image_{i:05}.jpg", label, names[label]) for i, label in enumerate(labels, 1)]),
                    REGENERATED)


def read_aircraft(folder, images):
    label = {name: label for label, name in enumerate(lines(folder / "variants.txt"))}

    def read(part):                                       # "1025794 707-320": image, class
        for image, name in (line.split(maxsplit=1) for line in lines(folder / f"images_variant_{part}.txt")):
            yield f"{image}.jpg", label[name], name
    return assemble(images, read("train"), read("val"), read("test"), OFFICIAL)


def read_sun397(folder, images):
    label = {name: label for label, name in enumerate(lines(folder / "ClassName.txt"))}

    def read(file):                                       # "/a/apartment_building/outdoor/sun_aaa.jpg"
        for line in lines(folder / file):
            place = line.rpartition("/")[0]
            yield line[1:], label[place], " ".join(place.split("/")[:1:-1])            # "outdoor apartment_building"
    return assemble(images, *carve(read("Training_01.txt")), read("Testing_01.txt"), REGENERATED)


def read_ucf101(folder, images):
    lists = folder / "ucfTrainTestlist"
    label = {name: int(number) - 1 for number, name in map(str.split, lines(lists / "classInd.txt"))}

    def read(file):                                       # "ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1"
        for line in lines(lists / file):
            action, video = line.split()[0].split("/")
            name = "_".join(re.findall("[A-Z][^A-Z]*", action))
            yield f"{name}/{Path(video).stem}.jpg", label[action], name                # each video's middle frame
    return assemble(images, *carve(read("trainlist01.txt")), read("testlist01.txt"), REGENERATED)


RENAMED = {"airplanes": "airplane", "Faces": "face", "Leopards": "leopard", "Motorbikes": "motorbike",
           "AnnualCrop": "Annual Crop Land", "HerbaceousVegetation": "Herbaceous Vegetation Land",
           "Highway": "Highway or Road", "Industrial": "Industrial Buildings", "Pasture": "Pasture Land",
           "PermanentCrop": "Permanent Crop Land", "Residential": "Residential Buildings", "SeaLake": "Sea or Lake"}
DROPPED = ("BACKGROUND_Google", "Faces_easy")             # CoOp's classes of Caltech101 and EuroSAT
SPLITS_URL = ("https://raw.githubusercontent.com/linzhiqiu/cross_modal_adaptation/"
              "ac9077ee4e422f768c9b9109551468605e33ec9a/splits/")


def published(name, sha256):
    """The reader of a data set whose split depends on the machine that made it: CoOp's file, downloaded and checked;
    the last resort is a split of our own, announced."""
    def read(folder, images):
        try:
            content = sha256 and download(SPLITS_URL + name, sha256, f"put a copy in {folder}")
        except OSError as error:
            content = print(f"cannot download CoOp's split {name} ({error})")
        if content:
            part = folder / f"{name}.{os.getpid()}.part"  # jobs of a sweep may all download it
            part.write_bytes(content)
            os.replace(part, folder / name)
            return read_split(folder / name, images)
        print(f"put CoOp's {name} in {folder} for numbers that compare")
        found = class_folders(images)
        return seeded({RENAMED.get(key, key): found[key] for key in found if key not in DROPPED},
                      "seeded (not CoOp's)")
    return read


def imagenet_classes(folder, keys):
    """Items of class folders named by WordNet ids, or by V2's integers, and the classes' names. keys: all, if known."""
    found, wnids = class_folders(folder), ImageNetInfo().label_names()
    names = {**dict(zip(wnids, open_clip.IMAGENET_CLASSNAMES)),                        # equal to CoOp's classnames.txt
             **{str(label): name for label, name in enumerate(open_clip.IMAGENET_CLASSNAMES)}}
    missing, extra = [[key for key in one if key not in other] for one, other in
                      ((keys or (), found), (found, keys or wnids))]
    if missing or extra:
        raise InputError(f"{folder} holds {len(found)} class folders: {len(missing)} are missing ({listed(missing)}) "
                         f"and {len(extra)} are no class of ImageNet ({listed(extra)})")
    keys = keys or list(found)
    return [Item(path, label) for label, key in enumerate(keys) for path in found[key]], [names[key] for key in keys]


def listed(names, most=3):
    return ", ".join(map(str, names[:most])) or "none"


def read_imagenet(folder, images):
    (train, names), (test, _) = [imagenet_classes(images / part, ImageNetInfo().label_names())
                                 for part in ("train", "val")]
    return Data(names, train, [], test, "official, val as test")


def read_variant(folder, images, keys=ImageNetInfo().label_names):
    """A test set of domain generalization: of all classes, or of those of ImageNet that have a folder."""
    test, names = imagenet_classes(images, keys and keys())
    return Data(names, [], [], test, OFFICIAL)


def read_shapes(split):
    """The bundled demo: compositions such as "striped blue boat", rendered from a seed (see shapes.py)."""
    if split:
        raise InputError(f"--split {split}: the demo's images are rendered and take no split file")
    classes, *parts = shapes.task()
    items = [[Item(Image.fromarray(image), label) for image, label, _ in part] for part in parts]
    for item, (*_, scene) in zip(sum(items, []), sum(parts, [])):
        item.image.info["scene"] = scene                  # what is drawn, for retrieval by attribute
    return Data(classes, items[0], [], items[1], "rendered")


def read_own(folder, split):
    """A folder of class folders, or of train/ and test/ (or val/) with class folders in each."""
    if not folder.is_dir():
        raise InputError(f"--dataset {folder}: neither a folder nor one of shapes, {', '.join(DATASETS)}")
    if split:
        return read_split(Path(split), folder)
    test = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or test is None:
        return seeded(class_folders(folder), "a seeded half for training, the other for testing", 0.5, 0)
    found = class_folders(folder / "train"), class_folders(test)
    classes, other = list(found[0]), sorted(found[0].keys() ^ found[1].keys())
    if other:
        raise InputError(f"{folder}: the class {other[0]!r} is in only one of train/ and {test.name}/")
    items = [[Item(path, classes.index(name)) for name, paths in part.items() for path in paths] for part in found]
    return Data(classes, items[0], [], items[1], f"the folders train and {test.name}")


def image_files(folder):
    """Every image file below a folder, sorted."""
    return sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names
                  if name.lower().endswith(IMG_EXTENSIONS) and not name.startswith("."))


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


def seeded(found, name, *parts):
    """A split of our own, announced, of {class name: images} that come with none."""
    print(f"split: {name}")
    items = [Item(path, label) for label, paths in enumerate(found.values()) for path in paths]
    return Data(list(found), *shares(items, *parts), name)


def download(url, sha256, instead):
    """A published file's bytes. Errors: OSError without a network; InputError, which says what to do `instead`."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{url} is not the file it was (sha256); {instead}")
    return content


def read_split(file, images):
    """CoOp's split format: {"train": [[path under `images`, label, class name], ...], "val": ..., "test": ...}."""
    try:
        split = json.loads(file.read_text(encoding="utf-8"))
        parts = [[(str(path), label, str(name)) for path, label, name in split[part]]
                 for part in ("train", "val", "test")]
    except OSError as error:
        raise InputError(f"split file {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"split file {file} is not in CoOp's format ({type(error).__name__}: {error})") from None
    return assemble(images, *parts, file.name)


PHOTO = "a photo of a {}."
BY_HAND = "its lists and images come from {}, laid out as CoOp's DATASETS.md says"
DATASETS = {
    # name: Source(folders below --data-root, images, (classes, train, val, test), template, λ_reg, obtain, read)
    "imagenet": Source(("imagenet",), "images", (1000, 1281167, 0, 50000), PHOTO, 0.5,
                       BY_HAND.format("image-net.org (ILSVRC 2012, in images/train and images/val)"), read_imagenet),
    "caltech101": Source(("caltech-101", "caltech101"), "101_ObjectCategories", (100, 4128, 1649, 2465), PHOTO, 0.5,
                         "Caltech101", published("split_zhou_Caltech101.json",
                         "52ce83205ff8ff8a1a18119aad6376120ae35c36e783a984bc560cbf10e73fa5")),
    "oxford_pets": Source(("oxford_pets", "oxford-iiit-pet"), "images", (37, 2944, 736, 3669),
                          "a photo of a {}, a type of pet.", 0.2, "OxfordIIITPet", read_pets),
    "stanford_cars": Source(("stanford_cars",), "", (196, 6509, 1635, 8041), PHOTO, 7.0,
                            BY_HAND.format("github.com/pytorch/vision/issues/7545 (cars_train, cars_test, devkit, "
                                           "cars_test_annos_withlabels.mat)"), read_cars),
    "oxford_flowers": Source(("oxford_flowers", "flowers-102"), "jpg", (102, 4093, 1633, 2463),
                             "a photo of a {}, a type of flower.", 4.0, "Flowers102", read_flowers),
    "food101": Source(("food-101",), "images", (101, 50500, 20200, 30300), "a photo of {}, a type of food.", 5.0,
                      "Food101", published("split_zhou_Food101.json", None)),
    "fgvc_aircraft": Source(("fgvc_aircraft", "fgvc-aircraft-2013b/data"), "images", (100, 3334, 3333, 3333),
                            "a photo of a {}, a type of aircraft.", 6.0, "FGVCAircraft", read_aircraft),
    "sun397": Source(("sun397",), "SUN397", (397, 15880, 3970, 19850), PHOTO, 6.0,
                     BY_HAND.format("vision.princeton.edu/projects/2010/SUN (SUN397/, ClassName.txt, Training_01.txt, "
                                    "Testing_01.txt)"), read_sun397),
    "dtd": Source(("dtd", "dtd/dtd"), "images", (47, 2820, 1128, 1692), "{} texture.", 6.0,
                  "DTD", published("split_zhou_DescribableTextures.json",
                  "f26ebeccd2b58e68d70f07a0dc39fe49bf7b69024bac34396b954dfd87969c38")),
    "eurosat": Source(("eurosat",), "2750", (10, 13500, 5400, 8100), "a centered satellite photo of {}.", 0.01,
                      "EuroSAT", published("split_zhou_EuroSAT.json",
                      "541503a77d0b26b735d85ec7a3e672804fe0aa466c2e5f07da772cc6c0af8ad2")),
    "ucf101": Source(("ucf101",), "UCF-101-midframes", (101, 7639, 1898, 3783), "a photo of a person doing {}.", 3.0,
                     BY_HAND.format("crcv.ucf.edu (ucfTrainTestlist) and CoOp's UCF-101-midframes.zip"), read_ucf101),
    # test sets of domain generalization
    "imagenetv2": Source(("imagenetv2",), "imagenetv2-matched-frequency-format-val", (1000, 0, 0, 10000), PHOTO, 0.5,
                         BY_HAND.format("github.com/modestyachts/ImageNetV2"),
                         partial(read_variant, keys=lambda: list(map(str, range(1000))))),
    "imagenet_sketch": Source(("imagenet-sketch",), "images", (1000, 0, 0, 50889), PHOTO, 0.5,
                              BY_HAND.format("github.com/HaohanWang/ImageNet-Sketch"), read_variant),
    "imagenet_a": Source(("imagenet-adversarial",), "imagenet-a", (200, 0, 0, 7500), PHOTO, 0.5,
                         BY_HAND.format("github.com/hendrycks/natural-adv-examples"),
                         partial(read_variant, keys=None)),
    "imagenet_r": Source(("imagenet-rendition",), "imagenet-r", (200, 0, 0, 30000), PHOTO, 0.5,
                         BY_HAND.format("github.com/hendrycks/imagenet-r"), partial(read_variant, keys=None)),
}
TRAINABLE, VARIANTS = list(DATASETS)[:11], list(DATASETS)[11:]                         # the eleven, and the four


# ----------------------------------------------------------------------------------------------------------- protocol

def few_shot(train, val, shots, seed):
    """Dassl's few-shot lists, item for item: one stream of random numbers, classes in first-seen order, a class with
    fewer than `shots` images whole; then the same from val with at most four."""
    rng = random.Random(seed)

    def draw(items, k):
        return [item for group in by_label(items).values()
                for item in (rng.sample(group, k) if len(group) >= k else group)]
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
            except Exception as error:                    # Pillow's plugins raise what the bytes make them raise
                raise InputError(f"{str(self.items[i].image)!r} is not a readable image ({error})") from None
        with torch.random.fork_rng(devices=[]):           # torchvision's transforms draw from the global generator only
            torch.manual_seed(self.seed * 10**7 + i)
            return self.transform(image), label


def batches(items, transform, batch_size, seed=None, workers=0):
    """Batches of images `[B, 3, S, S]` and labels `[B]`. seed: for training: shuffles and augments, and a last small
    batch is dropped as Dassl does; None keeps order and items."""
    return loader(Images(items, transform, seed or 0), batch_size, seed, workers)


def loader(found, batch_size, seed=None, workers=0):
    train = seed is not None
    return torch.utils.data.DataLoader(
        found, batch_size, shuffle=train, drop_last=train and len(found) >= batch_size,
        generator=torch.Generator().manual_seed(seed or 0), num_workers=workers, pin_memory=torch.cuda.is_available())
