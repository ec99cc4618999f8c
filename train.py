"""Trains DeAR on a few labelled images per class, tests it beside zero-shot CLIP, and uses what was trained.

    python train.py                                       # the bundled demo: no download, no GPU
    python train.py --dataset dtd --shots 16 --seeds 1 2 3
    python train.py --dataset all --protocol fewshot --shots 1 2 4 8 16
    python train.py --protocol cross                      # trained on ImageNet, tested on the ten others; or: domain
    python train.py --dataset path/to/folder              # one folder of images per class
    python train.py --summarize output                    # the paper's tables of whatever results there are
    python train.py --predict photos --checkpoint output/.../seed1.pt --classes cat dog
    python train.py --retrieve photo.jpg --gallery photos --checkpoint output/.../seed1.pt

A (data set, shots, seed) writes files of its own. What is finished is not repeated, what was interrupted goes on. What
is reported is the last step; nothing is chosen by test accuracy.
"""
import argparse
import copy
import csv
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import data
import dear
import roles
from roles import device, number

# What a flag left out becomes: MMRL's published recipe, and for the demo one chosen on other draws of its task.
TRANSFER = {"epochs": 1, "batch_size": 32, "lambda_reg": 0.2}                          # and no warm-up
RECIPES = {"base2novel": {"epochs": 10, "batch_size": 4}, "fewshot": {"epochs": 50, "batch_size": 32},
           "cross": TRANSFER, "domain": TRANSFER}
IMAGENET = {"epochs": 5, "batch_size": 32}                # in the first two
SHAPES = {"epochs": 20, "batch_size": 16, "lr": 5e-3, "workers": 0}
WARMUP_LR = 1e-5                                          # of the first epoch
EVAL_BATCH = 100
ABLATIONS = {                                             # the paper's: what becomes of the flags; masks are below
    "no-mask": {}, "generalization-mask": {}, "no-attributes": {}, "no-fusion-reg": {"lambda_fusion": 0.0},
    "no-reg": {"lambda_reg": 0.0}, "class-only": {"alpha_cls": 1.0}}


def parse(argv):
    """The flags. What has no default here gets one from RECIPES, SHAPES, the data set or the machine."""
    parser = argparse.ArgumentParser("train.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # What to learn from
    add("--dataset", help=f"shapes (the demo, default), {', '.join(data.DATASETS)}, all for the first eleven of them, "
                          "or a folder with one folder per class")
    add("--protocol", choices=RECIPES, default="base2novel", help="base2novel: trained on half the classes; fewshot: "
        "on all; cross, domain: trained on --dataset (imagenet), tested on --targets, too")
    add("--targets", nargs="+", help="of cross: default the ten others; of domain: ImageNet's four variants")
    add("--data-root", "--root", default="data", help="where the data sets lie, in CoOp's layout")
    add("--split", help="a CoOp split file (JSON) to use instead of the data set's own")
    add("--template", help="the prompt, with {} for the class name; default: CoOp's, or 'a photo of a {}.'")
    add("--shots", type=number(int, 1), nargs="+", default=[16], help="images per class; several: one run each")
    add("--seeds", "--seed", type=number(int, 0, 10**6), nargs="+", default=[1], help="one run each")
    # The frozen CLIP
    add("--model", "--backbone", help="OpenCLIP's name, or a folder in its format; default: ViT-B-16; demo for shapes")
    add("--pretrained", help="OpenCLIP's tag or a weights file; default: openai")
    add("--quick-gelu", action=argparse.BooleanOptionalAction, help="a weights file's activation; a tag knows its own")
    # The method (dear.py; what the paper leaves open is listed in the README)
    add("--roles", help="a role map, or mixed or generalization for every head; default: the model's, else the paper's")
    add("--ablate", choices=ABLATIONS, help="the method without one of its parts")
    add("--text-tokens", type=number(int, 0, 1000), default=5, help="K, the learned tokens after BOT")
    add("--beta", type=number(float, 0, 1), default=0.9, help="share of the learned token in each layer's inserted one")
    add("--alpha-cls", type=number(float, 0.001, 0.999), default=0.7, help="α_cls at the start")
    add("--lambda-reg", type=number(float, 0), help="weight of L_reg; default: MMRL's for the data set, 1 for a folder")
    add("--lambda-fusion", type=number(float, 0), default=0.1, help="weight of L_fusion")
    # The recipe
    add("--epochs", type=number(int, 1, 1000), help="default: base2novel 10, fewshot 50, cross and domain 1; 20 for "
        "shapes; ImageNet at most 5")
    add("--batch-size", type=number(int, 1, 10**6), help="default: base2novel 4, else and ImageNet 32; 16 for shapes")
    add("--lr", type=number(float, 0, 1e30), help="default: 1e-3; 5e-3 for shapes")
    add("--weight-decay", type=number(float, 0), default=5e-4)
    add("--views", type=number(int, 0, 1000), default=0, help="augmented views of each image, drawn once and kept as "
        "frozen CLIP sees them: epochs take turns at them; 0: drawn anew in every epoch")
    # The machine
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=["fp32", "bf16"], help="autocast of the towers; losses are fp32; default: bf16 on CUDA")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile and flex_attention; default: on CUDA")
    add("--workers", type=number(int, 0), help="processes that decode images; default: 8 at most, none for shapes")
    add("--output-dir", type=Path, default=Path("output"), help="results go to <protocol>/<dataset>/<model>/"
        "<shots>shots and what is not default, in it")
    add("--eval-only", action="store_true", help="test the checkpoints of these flags again")
    # What was trained
    add("--summarize", type=Path, metavar="FOLDER", help="tables of its results beside the published: summary.md")
    add("--predict", type=Path, metavar="IMAGE_OR_FOLDER", help="top-5 class names; of a folder as CSV")
    add("--retrieve", metavar="IMAGE", help="its nearest images by each attribute, as a picture; shapes: how often the "
        "demo's share the attribute")
    add("--gallery", type=Path, metavar="FOLDER", help="the images to retrieve from")
    add("--checkpoint", type=Path, help="what --predict and --retrieve use")
    add("--classes", nargs="+", help="class names to predict; default: the checkpoint's")
    args = parser.parse_args(argv)

    transfer = RECIPES[args.protocol] is TRANSFER
    args.dataset = args.dataset or ("imagenet" if transfer else "shapes")
    if args.dataset == "all" and (transfer or args.split or args.template):
        parser.error("--dataset all: goes with --protocol base2novel or fewshot, and without --split and --template")
    if args.targets and not transfer:
        parser.error("--targets: go with --protocol cross or domain")
    if args.targets is None and transfer:
        args.targets = [name for name in (data.VARIANTS if args.protocol == "domain" else data.TRAINABLE)
                        if name != args.dataset]
    if args.template and args.template.count("{}") != 1:
        parser.error(f"--template {args.template!r}: needs one {{}} where the class name goes")
    if (args.predict or args.retrieve) and not args.checkpoint:
        parser.error("--predict and --retrieve: need --checkpoint FILE, such as a seed1.pt that training wrote")
    if args.retrieve and args.retrieve != "shapes" and not args.gallery:
        parser.error("--retrieve IMAGE: needs --gallery FOLDER")
    # what differs from the defaults names the folder, so that ablations lie side by side
    changed = [flag for flag in ("ablate", "roles", *FLAGS)
               if flag != "shots" and getattr(args, flag) != parser.get_default(flag)]
    args.variant = "-".join(f"{flag}={short(getattr(args, flag))}" for flag in changed)
    for key, value in ABLATIONS.get(args.ablate, {}).items():
        if key in changed:
            parser.error(f"--ablate {args.ablate}: sets --{key.replace('_', '-')} itself")
        setattr(args, key, value)
    cuda = args.device.startswith("cuda")
    args.model = args.model or ("demo" if args.dataset == "shapes" else "ViT-B-16")
    args.pretrained = args.pretrained or (None if dear.weights_folder(args.model) else "openai")
    args.precision = args.precision or ("bf16" if cuda else "fp32")
    args.compile = cuda if args.compile is None else args.compile
    return parser, args


def short(value):
    """A flag's value as a name: the last part of a path, in characters that any file can hold."""
    return os.path.basename(str(value)).encode("utf-8", "backslashreplace").decode()


def resolve(args, name, shots, template, lambda_reg):
    """The flags of one data set and number of shots: what is still open comes from RECIPES, SHAPES and the data set."""
    args = copy.copy(args)
    args.dataset, args.shots = name, shots
    recipe = {"template": template, "lambda_reg": lambda_reg, "lr": 1e-3, "workers": min(8, os.cpu_count()),
              **RECIPES[args.protocol]}
    if name == "imagenet" and RECIPES[args.protocol] is not TRANSFER:
        recipe.update(IMAGENET)
    for key, value in {**recipe, **(SHAPES if name == "shapes" else {})}.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    model = short(Path(args.model).resolve()) if dear.weights_folder(args.model) else args.model.replace("/", "-")
    model += f"-{Path(short(args.pretrained)).stem}" if args.pretrained else ""
    protocol = "transfer" if RECIPES[args.protocol] is TRANSFER else args.protocol     # one training serves both
    args.output_dir = args.output_dir / protocol / short(Path(name).resolve()) / model / re.sub(
        r"[^\w.=+-]+", "_", "-".join(filter(None, [f"{shots}shots", args.variant])))
    return args


# ----------------------------------------------------------------------------------------------------------- training

def learning_rate(epoch, epochs, lr):
    """One epoch at WARMUP_LR, then a cosine that never reaches 0 (Dassl's, which steps once per epoch)."""
    if epochs == 1:
        return lr
    return WARMUP_LR if epoch == 0 else lr * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2


LOSSES = ("loss", "CE", "reg", "fusion")


def autocast(args):
    """The towers' precision. Features leave them in float32, and logits and losses stay outside."""
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bf16")


def objective(args, model, features, f_text0, labels):
    """What a forward pass gave, and labels `[B]` → the four terms of LOSSES."""
    f_cls, f_attr, f_text, f_cls0 = features
    ce = dear.ce_loss(dear.fuse(f_cls, f_attr, f_text, model.alpha, model.clip.tau), labels)
    reg = dear.reg_loss(f_cls, f_cls0, f_text, f_text0)
    fusion = dear.fusion_loss(model.alpha)
    return torch.stack([ce + args.lambda_reg * reg + args.lambda_fusion * fusion, ce, reg, fusion])


def make_step(args, model, prompts, optimizer):
    """One training step: images `[B, 3, S, S]` or what frozen_image gave for them, labels `[B]` → the terms of LOSSES.

    Compiled as a whole: forward, losses and backward, a graph break, and the update."""
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):    # since torch 2.14; else backward() breaks the graph, too
        torch._dynamo.config.trace_autograd_ops = True
    with autocast(args):
        f_text0 = model.frozen_text(prompts)              # once per run: the class names do not change

    def step(images, labels):
        with autocast(args):
            features = model(images, prompts)
        terms = objective(args, model, features, f_text0, labels)
        terms[0].backward()
        terms = terms.detach()
        optimizer.step()
        return terms
    return torch.compile(step, disable=not args.compile)


def make_optimizer(args, model):
    """AdamW over what is trained. The learning rate is a tensor: a number would be compiled in."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], torch.tensor(args.lr),
                             weight_decay=args.weight_decay)


@torch.no_grad()
def keep_views(args, model, items, seed):
    """epoch → batches for a step. With --views the frozen part of each view is kept: on the GPU while it has room,
    else in host memory, x in `--precision`."""
    augment, drawn = data.transform(model.clip, train=True), [seed * 10**4 + v for v in range(args.views or args.epochs)]
    if not args.views:
        return lambda epoch: ((images.to(args.device, non_blocking=True), labels) for images, labels in data.batches(
            items, augment, args.batch_size, drawn[epoch], args.workers))
    kept, labels = [], torch.tensor([item.label for item in items])
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    size = args.views * len(items) * model.clip.visual.positional_embedding.numel() * dtype.itemsize
    full = args.device.startswith("cuda") and size > torch.cuda.mem_get_info(args.device)[0] / 2
    for view in tqdm(drawn, "views", leave=False, disable=None):
        found = []
        for images, _ in data.loader(data.Images(items, augment, view), EVAL_BATCH, workers=args.workers):
            with autocast(args):
                x, f_cls0 = model.frozen_image(images.to(args.device))
            found.append([part.to("cpu" if full else args.device) for part in (x.to(dtype), f_cls0)])
        kept.append([torch.cat(parts) for parts in zip(*found)])
    return lambda epoch: ((tuple(part[chosen].to(args.device) for part in kept[epoch % args.views]), labels[chosen])
                          for chosen in data.loader(range(len(items)), args.batch_size, seed * 10**4 + epoch))


def train(args, model, prompts, items, seed, settings, partial):
    """Trains `model` in place on the base classes' items. partial: the file that keeps each epoch, to go on from.

    Returns the last epoch's mean of each loss term, and seconds. Errors: FloatingPointError where a loss is not finite.
    """
    first, began = 0, time.time()
    optimizer = make_optimizer(args, model)
    one_step = make_step(args, model, prompts, optimizer)
    if partial.exists():
        state = dear.read_checkpoint(partial, optimizer=dict, losses=dict, epoch=int, seconds=float)
        model.load_trained(state["trained"])
        optimizer.load_state_dict(state["optimizer"])
        first, means, began = state["epoch"], state["losses"], began - state["seconds"]

    views = keep_views(args, model, items, seed)
    for epoch in range(first, args.epochs):
        lr = learning_rate(epoch, args.epochs, args.lr)
        optimizer.param_groups[0]["lr"].fill_(lr)
        total, started = torch.zeros(len(LOSSES)), time.time()
        bar = tqdm(views(epoch), f"seed {seed}, epoch {epoch + 1}", max(1, len(items) // args.batch_size),
                   leave=False, disable=None)
        for step, (images, labels) in enumerate(bar, 1):
            optimizer.zero_grad()
            terms = one_step(images, labels.to(args.device, non_blocking=True)).cpu()
            if not terms.isfinite().all():
                raise FloatingPointError(f"the loss of seed {seed} is {terms[0]} in epoch {epoch + 1}, step {step}: "
                                         f"try a lower --lr than {args.lr:g}, or --precision fp32")
            total += terms
            bar.set_postfix_str(" ".join(f"{name} {value:.3f}" for name, value in zip(LOSSES, terms)))
        means = dict(zip(LOSSES, (total / step).tolist()))
        print(f"seed {seed}  epoch {epoch + 1:2}/{args.epochs}  lr {lr:.1e}  "
              + "  ".join(f"{name} {value:.4f}" for name, value in means.items())
              + f"  α_cls {model.alpha[0]:.3f}  {time.time() - started:.1f} s", flush=True)
        dear.save_checkpoint(partial, model, settings=settings, seed=seed, losses=means, seconds=time.time() - began,
                             epoch=epoch + 1, optimizer=optimizer.state_dict())
    return means, time.time() - began


# ---------------------------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def accuracy(args, clip, items, logits):
    """Top-1 accuracy in percent of each branch. logits: images `[B, 3, S, S]` → {branch: `[B, C]`}."""
    right = {}
    for images, labels in tqdm(data.batches(items, data.transform(clip, train=False), EVAL_BATCH, workers=args.workers),
                               "testing", leave=False, disable=None):
        for branch, value in logits(images.to(args.device)).items():
            if not value.isfinite().all():
                raise FloatingPointError(f"the logits of {branch} are not finite: try a lower --lr, or "
                                         "--precision fp32")
            right[branch] = right.get(branch, 0) + (value.argmax(dim=1).cpu() == labels).sum().item()
    return {branch: 100 * count / len(items) for branch, count in right.items()}


def branches(args, model, prompts):
    """Logits of frozen CLIP and of DeAR: fused (which is reported), the class feature's, the attribute features'.

    One image prefix serves all of them; text features are computed once.
    """
    with torch.no_grad(), autocast(args):
        f_text0, f_text = model.frozen_text(prompts), model.adapted_text(prompts)
    alpha, tau = model.alpha.detach(), model.clip.tau
    alone = alpha * (torch.arange(len(alpha), device=alpha.device) > 0)

    def logits(images):
        with autocast(args):
            x, f_cls0 = model.frozen_image(images)
            f_cls, f_attr = model.adapted_image(x)
        found = {"CLIP": f_cls0 @ f_text0.T, "fused": dear.fuse(f_cls, f_attr, f_text, alpha, tau),
                 "class": f_cls @ f_text.T}
        if alone.any():
            found["attributes"] = dear.fuse(f_cls, f_attr, f_text, alone, tau)
        return found
    return logits


def harmonic_mean(base, novel):
    return 2 * base * novel / (base + novel) if base + novel else 0.0


# --------------------------------------------------------------------------------------------------------------- runs

FLAGS = ("template", "shots", "text_tokens", "beta", "alpha_cls", "lambda_reg", "lambda_fusion", "epochs", "batch_size",
         "lr", "weight_decay", "views", "precision")


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def digest_of(classes, items, template=None):
    return digest((classes, template, [(item.image.parts[-2:] if isinstance(item.image, Path) else "", item.label)
                                       for item in items]))


def what_decides(args, dataset, model):
    """What a run's numbers follow from, to tell two runs apart: flags, and fingerprints of data, weights and roles."""
    return {**{flag: getattr(args, flag) for flag in FLAGS}, "quick_gelu": model.clip.quick_gelu,
            "classes": "base" if args.protocol == "base2novel" else "all",
            "data": digest_of(dataset.classes, dataset.train + dataset.test), "weights": model.clip.fingerprint,
            "roles": digest((model.roles.attributes, model.roles.visible.tolist()))}


KINDS = {"protocol": str, "model": str, "variant": str, "shots": int, "dataset": str, "seed": int, "settings": dict,
         "alpha": dict, "checkpoint": str, "tests": dict}
WHICH = list(KINDS)[:6]                                   # what tells one result from another


def read_result(file):
    """What an earlier run wrote. Errors: InputError."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        assert all(isinstance(result[key], kind) for key, kind in KINDS.items())
        assert all(isinstance(found.get(branch, 0.0), (int, float)) for found in result["tests"].values()
                   for branch in BRANCHES)
        return result
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
        raise data.InputError(f"{file} is no result of train.py: move it, or give another --output-dir") from None


def same(args, file, earlier, settings):
    for key in settings:
        if earlier.get(key) != settings[key] and not (args.eval_only and key == "precision"):
            what = (f"other {key}" if key in ("data", "weights", "roles", "classes")
                    else f"{key} {earlier.get(key)}, not {settings[key]}")
            raise data.InputError(f"{file} was made with {what}: " + (
                "it is tested with the flags it was trained with" if args.eval_only
                else "give another --output-dir, or move it away"))


def choose_roles(args, clip):
    """The role map, with its part of --ablate taken out."""
    table = role_map(args, clip)
    if args.ablate == "no-mask":
        table = table._replace(visible=torch.ones_like(table.visible))
    elif args.ablate == "generalization-mask":            # attribute heads are open to every attribute
        table = table._replace(visible=table.visible.any(dim=-1, keepdim=True).expand_as(table.visible))
    elif args.ablate == "no-attributes":
        table = table._replace(attributes=(), visible=table.visible[..., :0])
    return table


def role_map(args, clip):
    """--roles, else the checkpoint's own map as computed by roles.py, else the paper's published heads."""
    if args.roles in ("mixed", "generalization"):
        return dear.uniform_roles(args.roles, clip)
    if args.roles or roles.map_path(clip).is_file():
        return dear.read_roles(args.roles or roles.map_path(clip), clip)
    weights = f" --pretrained {clip.pretrained}" if clip.pretrained else ""
    activation = " --quick-gelu" if args.quick_gelu else ""
    compute = f"python roles.py --model {clip.name}{weights}{activation} --dataset path/to/images"
    if (clip.layers, clip.heads) != (12, 12):             # the paper publishes heads of ViT-B/16 only
        raise data.InputError(f"no role map for {clip.name}{weights}: {compute} computes one; or give --roles FILE, or "
                              "--roles mixed to mask nothing")
    print(f"no role map computed for these weights, taking the paper's published heads; {compute} computes one")
    return dear.read_roles(roles.PUBLISHED, clip)


def run(args):
    """A sweep over data sets, shots and seeds. All data are read before any model is loaded."""
    if args.summarize:
        return summarize(args.summarize)
    if args.predict or args.retrieve:
        model, saved = dear.load_checkpoint(args.checkpoint, device=args.device, classes=list, template=str)
        if not saved["classes"] or not all(isinstance(name, str) for name in saved["classes"]):
            raise data.InputError(f"{args.checkpoint} is no checkpoint of train.py: its classes are no names")
        return predict(args, model, saved) if args.predict else retrieve(args, model)
    names = data.TRAINABLE if args.dataset == "all" else [args.dataset]
    args.targets = list(dict.fromkeys(args.targets or ()))
    tested = Counter(short(Path(name).resolve()) for name in (*names, *args.targets)).most_common(1)[0]
    if tested[1] > 1:
        raise data.InputError(f"--targets: two data sets are named {tested[0]}; results go by that name, rename one")
    loaded = {name: data.load(name, args.data_root, args.split) for name in names}
    targets = {name: data.load(name, args.data_root) for name in args.targets}
    for name, (dataset, *_) in loaded.items():
        needed = 4 if args.protocol == "base2novel" else 2
        if len(dataset.classes) < needed or not dataset.train:
            raise data.InputError(f"--dataset {name} has {len(dataset.classes)} classes and {len(dataset.train)} "
                                  f"training images; --protocol {args.protocol} needs {needed} classes, and images")
    for name, (target, *_) in targets.items():
        if len(target.classes) < 2:
            raise data.InputError(f"--targets {name} has one class; there is nothing to tell apart")
    tasks = [(resolve(args, name, shots, *loaded[name][1:]), loaded[name][0])
             for name in names for shots in dict.fromkeys(args.shots)]
    clip = dear.load_clip(args.model, args.pretrained, args.quick_gelu, args.device)
    model = dear.DeAR(clip, choose_roles(args, clip), args.text_tokens, args.beta,
                      flex=args.compile and args.device.startswith("cuda"))
    results = []
    for task, dataset in tasks:
        torch.compiler.reset()                            # else many data sets use up Dynamo's limit of recompilations
        labels, tests = protocol(task, dataset, targets)
        settings = what_decides(task, dataset, model)
        announce(task, dataset, model, tests)
        results += [train_and_test(task, dataset, model, labels, tests, settings, seed)
                    for seed in dict.fromkeys(args.seeds)]
    report(results)


def protocol(args, dataset, targets):
    """What is trained on, as labels, and what is tested: {name: (class names, items, template)}."""
    def part(labels):
        return [dataset.classes[label] for label in labels], data.select(dataset.test, labels), args.template
    base, novel = data.halves(dataset.classes)
    if args.protocol == "base2novel":                     # each half among its own names
        return base, {"base": part(base), "novel": part(novel)}
    tests = {short(Path(args.dataset).resolve()): part(base + novel)}
    for name, (target, template, _) in targets.items():
        tests[short(Path(name).resolve())] = target.classes, target.test, template
    return base + novel, tests


def announce(args, dataset, model, tests):
    clip, first = model.clip, next(iter(tests.values()))
    activation = f"{'QuickGELU' if clip.quick_gelu else 'GELU'} (by {clip.activation_from})"
    tested = ", ".join(f"{name} {len(names)} classes, {len(items)} test images"
                       for name, (names, items, _) in tests.items())
    print(f"\ndata      {args.dataset}: {tested}; split: {dataset.split}\n"
          f"model     {' '.join(filter(None, (clip.name, clip.pretrained)))}, {activation}, "
          f"{sum(p.numel() for p in model.parameters()):,} parameters, "
          f"{sum(p.numel() for p in model.trained().values()):,} of them trained\n"
          f"roles     {model.roles.source}; attributes: {', '.join(model.roles.attributes) or 'none'}\n"
          f"prompt    {data.prompts(args.template, first[0])[0]!r}\n"
          f"settings  {' '.join(f'{key}={value}' for key, value in vars(args).items() if value not in (None, '', []))}",
          flush=True)


@contextmanager
def locked(folder, seed):
    """Makes an output folder and lets one run at a time write a seed's files."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".seed{seed}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise data.InputError(f"another run is writing seed {seed} to {folder}: wait, or give another --output-dir"
                                  ) from None
        yield


def write_json(file, value):
    file.with_suffix(".tmp").write_text(json.dumps(value, indent=1))
    os.replace(file.with_suffix(".tmp"), file)


def train_and_test(args, dataset, model, labels, tests, settings, seed):
    """One seed: trained, unless its checkpoint is there, and tested on what its result does not hold yet."""
    file, final, partial = [args.output_dir / f"seed{seed}{suffix}" for suffix in (".json", ".pt", ".part.pt")]
    cuda = args.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    if args.eval_only and not final.exists():
        raise data.InputError(f"no checkpoint {final}: --eval-only tests what the same flags have trained")
    with locked(args.output_dir, seed):
        for path in (file, final, partial):
            if path.exists():
                same(args, path, (read_result(path) if path == file
                                  else dear.read_checkpoint(path, settings=dict))["settings"], settings)
        result = read_result(file) if file.exists() else {"tests": {}}
        if args.eval_only:
            file, result = file.with_suffix(".eval.json"), {"tests": {}}
        due = {name: test for name, test in tests.items()
               if result["tests"].get(name, {}).get("data") != digest_of(*test)}       # new, or other data by that name
        if not due:
            print(f"{file} is finished", flush=True)
            return result
        chosen = data.few_shot(dataset.train, dataset.val, args.shots, seed)           # of all classes, as Dassl does
        items = data.select(chosen[0], labels)
        names = [dataset.classes[label] for label in labels]
        prompts = model.prompts(dear.tokenize(model.clip, data.prompts(args.template, names)))
        if args.eval_only or final.exists():
            saved = dear.read_checkpoint(final, losses=dict, seconds=float)
            model.load_trained(saved["trained"])
            means, seconds = saved["losses"], saved["seconds"]
        else:
            write_json(args.output_dir / f"seed{seed}.images.json", {
                part: [[str(item.image) if isinstance(item.image, Path) else "rendered", item.label,
                        dataset.classes[item.label]] for item in found]
                for part, found in zip(("train", "val"), chosen)})
            model.reset(torch.Generator().manual_seed(seed), args.alpha_cls)
            per_class = Counter(item.label for item in items).values()
            frozen = accuracy(args, model.clip, items, branches(args, model, prompts))["CLIP"]
            print(f"seed {seed}  {len(items)} training images, {min(per_class)} to {max(per_class)} a class; zero-shot "
                  f"CLIP names {frozen:.2f} % of them", flush=True)                    # a fault in the data shows here
            means, seconds = train(args, model, prompts, items, seed, settings, partial)
            dear.save_checkpoint(final, model, settings=settings, seed=seed, classes=names, template=args.template,
                                 losses=means, seconds=seconds)
            partial.unlink()
        result = {
            "config": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
            "settings": settings, "dataset": args.output_dir.parts[-3], "shots": args.shots, "seed": seed,
            "variant": args.variant, "protocol": args.output_dir.parts[-4], "model": args.output_dir.parts[-2],
            "split": dataset.split, "roles": model.roles.source, "checkpoint": str(final), "losses": means,
            "alpha": dict(zip(("class", *model.roles.attributes), model.alpha.tolist())), "seconds": round(seconds, 2),
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commit": commit(),
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in
                                                                 ("torch", "torchvision", "open_clip_torch")}},
            "hardware": (torch.cuda.get_device_name() if cuda
                         else f"{platform.machine()} {torch.get_num_threads()} threads"),
            "tests": result["tests"]}
        for name, (classes, items, template) in due.items():
            prompts = model.prompts(dear.tokenize(model.clip, data.prompts(template, classes)))
            found = accuracy(args, model.clip, items, branches(args, model, prompts))
            result["tests"][name] = {"classes": len(classes), "images": len(items),
                                     "data": digest_of(classes, items, template), **found}
            result["peak_memory_mb"] = round(
                torch.cuda.max_memory_allocated() / 2**20 if cuda else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))
            write_json(file, result)                      # after each, so that an interrupted run goes on
        return result


def commit():
    """This code's git commit, marked where files were changed since; None outside a repository."""
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:                                       # no git on this machine
        return None


# ------------------------------------------------------------------------------------------------------------ reports

BRANCHES = {"CLIP": "CLIP", "fused": "DeAR", "class": "  class", "attributes": "  attributes"}


def gather(results):
    """Results → {(protocol, model, variant, shots): {data set: {test: {branch: one accuracy per seed}}}}, and seeds."""
    groups = {}
    for result in sorted(results, key=lambda result: result["seed"]):
        key = tuple(result[name] for name in WHICH[:4])
        tests = groups.setdefault(key, {}).setdefault(result["dataset"], {})
        tests.setdefault("seeds", []).append(result["seed"])
        for test, found in result["tests"].items():
            for branch in BRANCHES.keys() & found.keys():
                tests.setdefault(test, {}).setdefault(branch, []).append(found[branch])
    return groups


def row(tests, branch, spread=False):
    """One row of a table: {column: mean over the seeds}, or their standard deviation. Base and novel get their HM: of
    the means, and of each seed for the deviation. Targets get their average."""
    values = {test: found[branch] for test, found in tests.items() if test != "seeds" and branch in found}
    if spread:
        if set(values) == {"base", "novel"}:
            values["HM"] = [harmonic_mean(*pair) for pair in zip(values["base"], values["novel"])]
        return {test: statistics.stdev(found) for test, found in values.items() if len(found) > 1}
    return with_mean({test: statistics.mean(found) for test, found in values.items()})


def with_mean(columns):
    if set(columns) == {"base", "novel"}:
        return {**columns, "HM": harmonic_mean(columns["base"], columns["novel"])}
    targets = list(columns.values())[1:]                  # the first is what was trained on
    return {**columns, "average": statistics.mean(targets)} if targets else columns


def average(rows):
    """The mean over data sets of rows with the same columns; HM is that of the means, as the field does."""
    return with_mean({name: statistics.mean(row[name] for row in rows) for name in rows[0] if name != "HM"})


def report(results):
    """Prints a table for each data set, and their average."""
    for (protocol, _, _, shots), datasets in gather(results).items():
        rows = {}
        for name, tests in datasets.items():
            for branch in BRANCHES:
                rows.setdefault(branch, {})[name] = row(tests, branch)
            table(name, {BRANCHES[branch]: rows[branch][name] for branch in BRANCHES}, row(tests, "fused", spread=True),
                  shots, ",".join(map(str, tests["seeds"])))
        if len(datasets) > 1:
            same_columns = {branch: [{"all": next(iter(found.values()))} if protocol == "fewshot" else found
                                     for found in rows[branch].values()] for branch in ("CLIP", "fused")}
            table(f"average of {len(datasets)}", {BRANCHES[branch]: average(found)
                                                  for branch, found in same_columns.items()}, {}, shots, "")
    alpha = {name: statistics.mean(result["alpha"][name] for result in results) for name in results[0]["alpha"]}
    print("\nα  " + "  ".join(f"{name} {value:.3f}" for name, value in alpha.items()))
    print("\ncheckpoints and results  " + " ".join(result["checkpoint"] for result in results))


def table(title, rows, spread, shots, seeds):
    columns = next(iter(rows.values()))
    wide = [max(6, len(column)) for column in columns]

    def line(label, cells, shots="", seeds_=""):
        print(f"{label:{max(14, len(title))}} {shots:>6}  {seeds_:>{max(5, len(seeds))}} | "
              + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, wide)))
    print()
    line(title, columns, "shots", "seeds")
    for label, found in rows.items():
        if found:
            ours = label == "DeAR"
            line(label, (f"{found[column]:.2f}" for column in columns), *((shots, seeds) if ours else ()))
            if ours and spread:
                line("  ± std", (f"{spread[column]:.2f}" if column in spread else "" for column in columns))


def summarize(folder):
    """Writes summary.md, and fewshot.png where there are results of that protocol: our results in `folder` beside the
    published ones (published.json, with its sources)."""
    files = [file for file in sorted(folder.rglob("seed*.json")) if re.fullmatch(r"seed\d+", file.stem)]
    if not files:
        raise data.InputError(f"--summarize {folder}: no seed*.json in it; train first, or name another folder")
    results = {}
    for file in files:
        result = read_result(file)
        if result["protocol"] == "base2novel" and len(result["tests"]) < 2:
            print(f"left out: {file}, whose novel classes are not tested yet")
            continue
        first, other = results.setdefault(tuple(result[key] for key in WHICH), (result, file))
        if first["tests"] != result["tests"]:             # a copy counts once
            raise data.InputError(f"--summarize {folder}: {other} and {file} hold different results of one run; move "
                                  "one away")
    groups = gather(result for result, _ in results.values())
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    sections = [base_to_novel_section(groups, published), ablation_section(groups),
                *[transfer_section(groups, published, *one) for one in (
                    ("cross", "Table 3: cross-dataset, trained on ImageNet", data.TRAINABLE),
                    ("domain", "Table 4: domain generalization, trained on ImageNet", ["imagenet", *data.VARIANTS]))],
                *other_transfers(groups), few_shot_section(groups, published, folder)]
    text = "\n\n".join(["# Results\n\nAccuracy in percent, mean ± standard deviation over seeds. *Published* rows are "
                        "other people's figures, copied (published.json says from where); – stands for none.",
                        *filter(None, sections)]) + "\n"
    part = folder / "summary.md.tmp"
    part.write_text(text, encoding="utf-8")
    os.replace(part, folder / "summary.md")
    print(f"{text}\n{folder / 'summary.md'}")


PUBLISHED = Path(__file__).resolve().with_name("published.json")


def markdown(title, columns, rows):
    """A section. rows: label → {column: text}."""
    lines = [[label, *[cells.get(column, "–") for column in columns]] for label, cells in rows]
    return "\n".join([f"## {title}", "", f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|",
                      *[f"| {' | '.join(line)} |" for line in lines]])


def cells(means, spread=()):
    return {name: f"{value:.2f}" + (f" ± {spread[name]:.2f}" if name in spread else "")
            for name, value in means.items() if value is not None}


def ours(key):
    _, model, variant, shots = key
    return ", ".join(filter(None, (f"**DeAR, ours** ({model}", f"{shots} shots", spelled(variant)))) + ")"


def spelled(variant):
    return re.sub(r"-(?=[a-z_]+=)", ", ", variant)        # a value may hold a dash, too


def base_to_novel_section(groups, published):
    groups = {key: datasets for key, datasets in groups.items() if key[0] == "base2novel" and "ablate=" not in key[2]}
    if not groups:
        return None
    rows, names = [], [name for name in data.TRAINABLE if any(name in found for found in groups.values())]
    names += sorted({name for found in groups.values() for name in found} - set(names))
    for name in ["average", *names]:
        rows.append((f"***{name}***", dict.fromkeys(("base", "novel", "HM"), "")))
        for method, found in published["base2novel"].items():
            if name in found:
                base, novel, *hm = found[name]
                hm = hm or [harmonic_mean(base, novel) if base and novel else None]
                rows.append((f"{method}, published", cells({"base": base, "novel": novel, "HM": hm[0]})))
        for key, datasets in groups.items():
            for branch in ("CLIP", "fused"):
                label = ours(key) if branch == "fused" else f"CLIP, ours ({key[1]})"
                if name in datasets:
                    rows.append((label, cells(row(datasets[name], branch), row(datasets[name], branch, spread=True))))
                elif name == "average":
                    of = f", over {len(datasets)} data set{'s' if len(datasets) > 1 else ''}"
                    rows.append((label + of, cells(average([row(tests, branch) for tests in datasets.values()]))))
    return markdown("Table 2: base-to-novel", ("base", "novel", "HM"), rows)


def ablation_section(groups):
    """Each ablation beside the full method on the data sets that both have; the paper's own figures are not at hand."""
    rows = []
    for key, datasets in groups.items():
        without, *rest = spelled(key[2]).split(", ")
        full = groups.get((*key[:2], "-".join(rest), key[3]), {})
        common = [name for name in datasets if name in full]
        if key[0] == "base2novel" and without.startswith("ablate=") and common:
            for label, found in (("DeAR", full), (without.removeprefix("ablate="), datasets)):
                rows.append((", ".join([label, key[1], f"{key[3]} shots", *rest, f"over {', '.join(common)}"]),
                             cells(average([row(found[name], "fused") for name in common]))))
    return markdown("Ablations, base-to-novel", ("base", "novel", "HM"), dict(rows).items()) if rows else None


def transfer_section(groups, published, protocol, title, columns):
    """Table 3 or 4: trained on ImageNet, tested on `columns`."""
    rows = []
    for key, datasets in groups.items():
        tests = datasets.get("imagenet", {}) if key[0] == "transfer" else {}
        chosen = {name: tests[name] for name in columns if name in tests}
        if len(chosen) > 1:
            rows += transfer_rows(key, chosen, len(columns) - 1)
    rows = rows and [(f"{method}, published", cells({k: v for k, v in found.items() if k != "source"}))
                     for method, found in published[protocol].items()] + rows
    return markdown(title, (*columns, "average"), rows) if rows else None


def transfer_rows(key, tests, targets=0):
    of = f", average over {len(tests) - 1} of {targets}" if len(tests) - 1 < targets else ""
    return [(label + of, cells(row(tests, branch), row(tests, branch, spread=True)))
            for branch, label in (("CLIP", f"CLIP, ours ({key[1]})"), ("fused", ours(key)))]


def other_transfers(groups):
    """A section for each other data set that was trained on, and for ImageNet's own targets."""
    sections = []
    for key, datasets in groups.items():
        for source, tests in datasets.items() if key[0] == "transfer" else ():
            chosen = {name: found for name, found in tests.items()
                      if name != "seeds" and not (source == "imagenet" and name in list(data.DATASETS)[1:])}
            if len(chosen) > 1:
                sections.append(markdown(f"Cross-dataset, trained on {source}", (*chosen, "average"),
                                         transfer_rows(key, chosen)))
    return sections


def few_shot_section(groups, published, folder):
    """Figure 4: accuracy over shots, a panel per data set, and one for the average where all eleven are there."""
    lines = {}                                            # {data set: {method: {shots: accuracy}}}
    for (protocol, model, variant, shots), datasets in groups.items():
        if protocol == "fewshot":
            for name, tests in datasets.items():
                label = " ".join(filter(None, ("DeAR, ours", model, variant)))
                lines.setdefault(name, {}).setdefault(label, {})[shots] = next(iter(row(tests, "fused").values()))
            if set(data.TRAINABLE) <= set(datasets):
                lines.setdefault("average", {}).setdefault(label, {})[shots] = statistics.mean(
                    lines[name][label][shots] for name in data.TRAINABLE)
    if not lines:
        return None
    for name, methods in lines.items():
        for method, found in published["fewshot"].items():
            if name in found:
                methods[f"{method}, published"] = {int(k): v for k, v in found[name].items()}
    import matplotlib                                     # only here: it takes a second to load
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False        # a folder's name may hold a $
    from matplotlib import pyplot
    wide = min(4, len(lines))
    figure, axes = pyplot.subplots(-(-len(lines) // wide), wide, squeeze=False, layout="constrained",
                                   figsize=(4.2 * wide, 3.2 * -(-len(lines) // wide)))
    for axis in axes.flat[len(lines):]:
        axis.set_axis_off()
    for axis, (name, methods) in zip(axes.flat, lines.items()):
        for method, found in methods.items():
            own = method.startswith("DeAR, ours")
            if set(found) == {0}:                         # zero-shot: the same at any number
                axis.axhline(found[0], color="gray", linestyle=":", label=method)
                continue
            axis.plot(sorted(found), [found[k] for k in sorted(found)], "o-" if own else ".--", label=method)
        axis.set(title=name, xscale="log", xlabel="shots", ylabel="accuracy (%)")
        ticks = sorted({k for found in methods.values() for k in found if k})
        axis.set_xticks(ticks, map(str, ticks), minor=False)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.savefig(folder / "fewshot.png.tmp", format="png", dpi=130)
    os.replace(folder / "fewshot.png.tmp", folder / "fewshot.png")
    shots = sorted({k for methods in lines.values() for found in methods.values() for k in found})
    return markdown("Figure 4: few-shot, accuracy over shots", [f"{k} shots" for k in shots],
                    [(f"{name}: {method}", {f"{k} shots": f"{value:.2f}" for k, value in found.items()})
                     for name, methods in lines.items() for method, found in methods.items()]
                    ) + "\n\n![accuracy over shots](fewshot.png)"


# ------------------------------------------------------------------------------------------------ use what was trained

TOP = 5


def images_at(path):
    """The items of an image, or of a folder of images."""
    items = [data.Item(file, 0) for file in (data.image_files(path) if path.is_dir() else [path])]
    if not items or not items[0].image.is_file():
        raise data.InputError(f"{path}: {'no image there' if path.exists() else 'there is no such file or folder'}")
    return items


@torch.no_grad()
def predict(args, model, saved):
    """The most probable class names by the fused logits: of an image as lines, of a folder as CSV."""
    items, names = images_at(args.predict), args.classes or saved["classes"]
    prompts = model.prompts(dear.tokenize(model.clip, data.prompts(args.template or saved["template"], names)))
    logits, top = branches(args, model, prompts), min(TOP, len(names))
    out = csv.writer(sys.stdout, lineterminator="\n")
    if args.predict.is_dir():
        out.writerow(["image", *[f"{what}{k}" for k in range(1, top + 1) for what in ("class", "probability")]])
    done = 0
    preprocess = data.transform(model.clip, train=False)
    for images, _ in data.batches(items, preprocess, EVAL_BATCH, workers=args.workers or 0):
        values, classes = logits(images.to(args.device))["fused"].softmax(dim=1).topk(top)
        for one, best in zip(values.tolist(), classes.tolist()):
            if args.predict.is_dir():
                out.writerow([items[done].image, *[cell for p, k in zip(one, best) for cell in (names[k], f"{p:.4f}")]])
            else:
                print("\n".join(f"{p:7.2%}  {names[k]}" for p, k in zip(one, best)))
            done += 1
        sys.stdout.flush()


@torch.no_grad()
def features(args, model, items):
    """f_cls and each f_attr of images, `[n, 1 + A, E]`, normalised."""
    found = []
    for images, _ in tqdm(data.batches(items, data.transform(model.clip, train=False), EVAL_BATCH,
                                       workers=args.workers or 0), "images", leave=False, disable=None):
        with autocast(args):
            f_cls, f_attr = model.adapted_image(model.frozen_image(images.to(args.device))[0])
        found.append(torch.cat([f_cls[:, None], f_attr], dim=1).cpu())
    return torch.cat(found)


def retrieve(args, model):
    """Attribute-conditioned retrieval (paper, Figure 3): the nearest by the class feature and by each attribute's."""
    rows = ("class", *model.roles.attributes)
    if args.retrieve == "shapes":
        return neighbours_share(rows, *demo_features(args, model))
    query, gallery = images_at(Path(args.retrieve)), images_at(args.gallery)
    gallery = [item for item in gallery if item.image.resolve() != query[0].image.resolve()]
    if not gallery:
        raise data.InputError(f"--gallery {args.gallery}: no image there but the query itself")
    near = torch.einsum("re,nre->rn", features(args, model, query)[0], features(args, model, gallery)).topk(
        min(TOP, len(gallery)))
    size = 128
    picture = Image.new("RGB", (size * (TOP + 2), size * len(rows)), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for r, name in enumerate(rows):
        draw.text((size / 2, size * (r + .5)), name, "black", font, anchor="mm")
        for column, item in enumerate([query[0], *[gallery[k] for k in near.indices[r].tolist()]], 1):
            with Image.open(item.image) as image:
                picture.paste(image.convert("RGB").resize((size - 4, size - 4)), (size * column + 2, size * r + 2))
        print(f"{name:12} " + "  ".join(f"{gallery[k].image.name} {value:.3f}"
                                        for value, k in zip(near.values[r].tolist(), near.indices[r].tolist())))
    file = args.output_dir / f"retrieved-{Path(args.retrieve).stem}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file.with_suffix(".tmp"), "PNG")
    os.replace(file.with_suffix(".tmp"), file)
    print(f"{file}: the query, then its {TOP} nearest")


def demo_features(args, model):
    """The demo's test images: features, and each one's factors."""
    items = data.load("shapes")[0].test
    return features(args, model, items), [item.image.info["scene"] for item in items]


def neighbours_share(rows, found, scenes, top=TOP):
    """Figure 3's claim as a number: how often an image's nearest others share its factor, by each row's feature."""
    similar = torch.einsum("nre,mre->rnm", found, found)
    similar.diagonal(dim1=1, dim2=2).fill_(-torch.inf)    # not the image itself
    near = similar.topk(top, dim=2).indices               # [rows, n, top]
    factors = list(scenes[0])
    print(f"{len(scenes)} images; how many of each one's {top} nearest others share its factor, in percent\n"
          f"{'by':12} " + " ".join(f"{factor:>9}" for factor in factors))
    share = {factor: torch.tensor([[a[factor] == b[factor] for b in scenes] for a in scenes]) for factor in factors}
    for r, name in enumerate(rows):
        print(f"{name:12} " + " ".join(f"{100 * share[factor].gather(1, near[r]).float().mean():9.2f}"
                                       for factor in factors))
    others = len(scenes) - 1
    print(f"{'chance':12} " + " ".join(f"{100 * (share[factor].sum(dim=1) - 1).float().mean() / others:9.2f}"
                                       for factor in factors))


def main(argv=None):
    parser, args = parse(argv)
    roles.command(parser, run, args, "; the same command goes on from the last epoch")


if __name__ == "__main__":
    main()
