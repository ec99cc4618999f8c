"""Trains DeAR on a few labelled images per class and tests it beside zero-shot CLIP, on base and on novel classes.

    python train.py                                       # the bundled demo: no download, no GPU
    python train.py --dataset dtd --shots 16 --seeds 1 2 3
    python train.py --dataset path/to/folder              # one folder of images per class
    python train.py --dataset dtd --eval-only             # tests the checkpoints of an earlier run again

The protocol is CoOp's base-to-novel: trained on the first half of the classes, tested on each half with that half's
names as candidates. What is reported is the last step; nothing is chosen by test accuracy.
"""
import argparse
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
from tqdm import tqdm

import data
import dear
import roles
from roles import device, number

# What a flag left out becomes: MMRL's published recipe, and for the demo one chosen on other draws of its task.
RECIPE = {"model": "ViT-B-16", "epochs": 10, "batch_size": 4, "lr": 1e-3, "workers": min(8, os.cpu_count())}
SHAPES = {"model": "demo", "epochs": 20, "batch_size": 16, "lr": 5e-3, "workers": 0}
WARMUP_LR = 1e-5                                          # of the first epoch
EVAL_BATCH = 100


def parse(argv):
    """The flags. What has no default here gets one from RECIPE, SHAPES, the data set or the machine."""
    parser = argparse.ArgumentParser("train.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # What to learn from
    add("--dataset", default="shapes", help=f"{', '.join(data.DATASETS)}, or a folder with one folder per class")
    add("--data-root", "--root", default="data", help="where the data sets lie, in CoOp's layout")
    add("--split", help="a CoOp split file (JSON) to use instead of the data set's own")
    add("--template", help="the prompt, with {} for the class name; default: CoOp's, or 'a photo of a {}.'")
    add("--shots", type=number(int, 1), default=16, help="images per class")
    add("--seeds", "--seed", type=number(int, 0, 10**6), nargs="+", help="one run each, for mean and std; default: 1")
    # The frozen CLIP
    add("--model", "--backbone", help="OpenCLIP's name, or a folder in its format; default: ViT-B-16; demo for shapes")
    add("--pretrained", help="OpenCLIP's tag or a weights file; default: openai")
    add("--quick-gelu", action=argparse.BooleanOptionalAction, help="a weights file's activation; a tag knows its own")
    # The method (dear.py; what the paper leaves open is listed in the README)
    add("--roles", help="a role map, or mixed or generalization for every head; default: the model's, else the paper's")
    add("--text-tokens", type=number(int, 0, 1000), default=5, help="K, the learned tokens after BOT")
    add("--beta", type=number(float, 0, 1), default=0.9, help="share of the learned token in each layer's inserted one")
    add("--alpha-cls", type=number(float, 0.001, 0.999), default=0.7, help="α_cls at the start")
    add("--lambda-reg", type=number(float, 0), help="weight of L_reg; default: MMRL's for the data set, 1 for a folder")
    add("--lambda-fusion", type=number(float, 0), default=0.1, help="weight of L_fusion")
    # The recipe
    add("--epochs", type=number(int, 1, 1000), help="default: 10; 20 for shapes")
    add("--batch-size", type=number(int, 1, 10**6), help="default: 4, as the relatives; 16 for shapes")
    add("--lr", type=number(float, 0, 1e30), help="default: 1e-3; 5e-3 for shapes")
    add("--weight-decay", type=number(float, 0), default=5e-4)
    # The machine
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=["fp32", "bf16"], help="autocast of the towers; losses are fp32; default: bf16 on CUDA")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile and flex_attention; default: on CUDA")
    add("--workers", type=number(int, 0), help="processes that decode images; default: 8 at most, none for shapes")
    add("--output-dir", type=Path, help="default: output/<dataset>/<model>/<shots>shots and what is not default")
    add("--resume", action="store_true", help="go on from the last epoch of an interrupted run")
    add("--eval-only", action="store_true", help="test the checkpoints in --output-dir, trained with these flags")
    args = parser.parse_args(argv)

    # what differs from the defaults names the folder, so that ablations lie side by side
    changed = [f"{flag}={os.path.basename(str(getattr(args, flag)))}" for flag in ("roles", *FLAGS)
               if flag != "shots" and getattr(args, flag) != parser.get_default(flag)]
    folder = re.sub(r"[^\w.=+-]+", "_", "-".join([f"{args.shots}shots", *changed]))
    cuda = args.device.startswith("cuda")
    recipe = SHAPES if args.dataset == "shapes" else RECIPE
    for key, value in {**recipe, "precision": "bf16" if cuda else "fp32", "compile": cuda}.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    args.pretrained = args.pretrained or (None if dear.weights_folder(args.model) else "openai")
    model = Path(args.model).name + (f"-{Path(args.pretrained).stem}" if args.pretrained else "")
    args.output_dir = args.output_dir or Path("output", Path(args.dataset).resolve().name, model, folder)
    return parser, args


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


def make_losses(args, model, prompts):
    """The training step up to its losses: images `[B, 3, S, S]`, labels `[B]` → the four terms of LOSSES."""
    with autocast(args):
        f_text0 = model.frozen_text(prompts)              # once per run: the class names do not change

    def losses(images, labels):
        with autocast(args):
            f_cls, f_attr, f_text, f_cls0 = model(images, prompts)
        ce = dear.ce_loss(dear.fuse(f_cls, f_attr, f_text, model.alpha, model.clip.tau), labels)
        reg = dear.reg_loss(f_cls, f_cls0, f_text, f_text0)
        fusion = dear.fusion_loss(model.alpha)
        return ce + args.lambda_reg * reg + args.lambda_fusion * fusion, ce, reg, fusion
    return torch.compile(losses, disable=not args.compile)


def train(args, model, losses, items, seed, settings, partial):
    """Trains `model` in place on the base classes' items. partial: the file that keeps each epoch, for --resume.

    Returns the last epoch's mean of each loss term, and seconds. Errors: FloatingPointError where a loss is not finite.
    """
    first, began = 0, time.time()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=args.weight_decay)
    augment = data.transform(model.clip, train=True)
    if args.resume and partial.exists():
        state = dear.read_checkpoint(partial, optimizer=dict, losses=dict, epoch=int, seconds=float)
        model.load_trained(state["trained"])
        optimizer.load_state_dict(state["optimizer"])
        first, means, began = state["epoch"], state["losses"], began - state["seconds"]

    for epoch in range(first, args.epochs):
        lr = optimizer.param_groups[0]["lr"] = learning_rate(epoch, args.epochs, args.lr)
        total, started = torch.zeros(len(LOSSES)), time.time()
        bar = tqdm(data.batches(items, augment, args.batch_size, seed * 10**4 + epoch, args.workers),
                   f"seed {seed}, epoch {epoch + 1}", leave=False, disable=None)
        for step, (images, labels) in enumerate(bar, 1):
            terms = torch.stack(losses(*(t.to(args.device, non_blocking=True) for t in (images, labels))))
            optimizer.zero_grad()
            terms[0].backward()
            optimizer.step()
            terms = terms.detach().cpu()
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
                raise FloatingPointError(f"the logits of {branch} are not finite: try a lower --lr, or --precision fp32")
            right[branch] = right.get(branch, 0) + (value.argmax(dim=1).cpu() == labels).sum().item()
    return {branch: 100 * count / len(items) for branch, count in right.items()}


def zero_shot(args, model, prompts):
    """Frozen CLIP's logits, on the same prompts."""
    with autocast(args):
        f_text0 = model.frozen_text(prompts)

    def logits(images):
        with autocast(args):
            f_cls0 = model.frozen_image(model.image_prefix(images))
        return {"CLIP": f_cls0 @ f_text0.T}
    return logits


def adapted(args, model, prompts):
    """DeAR's logits: fused (what is reported), and those of the class feature and of the attribute features alone."""
    with torch.no_grad(), autocast(args):
        f_text, alpha, tau = model.adapted_text(prompts), model.alpha, model.clip.tau
    alone = alpha * (torch.arange(len(alpha), device=alpha.device) > 0)

    def logits(images):
        with autocast(args):
            f_cls, f_attr = model.adapted_image(model.image_prefix(images))
        branches = {"fused": dear.fuse(f_cls, f_attr, f_text, alpha, tau), "class": f_cls @ f_text.T}
        if len(alpha) > 1:
            branches["attributes"] = dear.fuse(f_cls, f_attr, f_text, alone, tau)
        return branches
    return logits


def harmonic_mean(base, novel):
    return 2 * base * novel / (base + novel) if base + novel else 0.0


# --------------------------------------------------------------------------------------------------------------- runs

FLAGS = ("template", "shots", "text_tokens", "beta", "alpha_cls", "lambda_reg", "lambda_fusion", "epochs", "batch_size",
         "lr", "weight_decay", "precision")


def what_decides(args, dataset, model):
    """What a run's numbers follow from, to tell two runs apart: flags, and fingerprints of data, weights and roles."""
    def digest(value):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
    images = [(item.image.parts[-2:] if isinstance(item.image, Path) else "", item.label)
              for item in dataset.train + dataset.test]
    return {**{flag: getattr(args, flag) for flag in FLAGS}, "quick_gelu": model.clip.quick_gelu,
            "data": digest((dataset.classes, images)), "weights": model.clip.fingerprint,
            "roles": digest((model.roles.attributes, model.roles.visible.tolist()))}


def check_earlier(args, settings):
    """Refuses to mix two runs, or to write one over another: what the output folder holds must be of these settings."""
    for file in args.output_dir.glob("seed*.pt"):
        same(args, file, dear.read_checkpoint(file, settings=dict)["settings"], settings)
    file = args.output_dir / "results.json"
    if file.exists() and not args.eval_only:
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))
            earlier, others = dict(earlier["settings"]), {int(run["seed"]) for run in earlier["runs"]} - set(args.seeds)
        except (ValueError, KeyError, TypeError):
            raise data.InputError(f"{file} is no result of train.py: move it, or give another --output-dir") from None
        same(args, file, earlier, settings)
        if others:
            raise data.InputError(f"{file} also holds seed {min(others)}: name it, too, with --resume, which keeps what "
                                  "is trained; or give another --output-dir")


def same(args, file, earlier, settings):
    for key in settings:
        if earlier.get(key) != settings[key] and not (args.eval_only and key == "precision"):
            what = (f"other {key}" if key in ("data", "weights", "roles")
                    else f"{key} {earlier.get(key)}, not {settings[key]}")
            raise data.InputError(f"{file} was made with {what}: " + (
                "it is tested with the flags it was trained with" if args.eval_only
                else "give another --output-dir, or move it away"))


def choose_roles(args, clip):
    """The role map: --roles, else the checkpoint's own as computed by roles.py, else the paper's published heads."""
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
    """One command: data, CLIP and roles, then zero-shot CLIP, each seed's training and testing, table, results.json."""
    dataset, template, lambda_reg = data.load(args.dataset, args.data_root, args.split)
    if len(dataset.classes) < 4:
        raise data.InputError(f"--dataset {args.dataset} has {len(dataset.classes)} classes; base-to-novel needs four")
    args.template = template if args.template is None else args.template
    if args.template.count("{}") != 1:
        raise data.InputError(f"--template {args.template!r}: needs one {{}} where the class name goes")
    args.lambda_reg = lambda_reg if args.lambda_reg is None else args.lambda_reg
    clip = dear.load_clip(args.model, args.pretrained, args.quick_gelu, args.device)
    model = dear.DeAR(clip, choose_roles(args, clip), args.text_tokens, args.beta,
                      flex=args.compile and args.device.startswith("cuda"))
    settings = what_decides(args, dataset, model)
    with locked(args.output_dir):
        base_to_novel(args, dataset, model, settings)


@contextmanager
def locked(folder):
    """Makes an output folder and lets one run at a time write to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise data.InputError(f"another run is writing to {folder}: give another --output-dir") from None
        yield


def base_to_novel(args, dataset, model, settings):
    """CoOp's protocol: trained on the first half of the classes, tested on either half among its own names."""
    clip = model.clip
    trained = [int(file.stem[4:]) for file in args.output_dir.glob("seed*.pt") if file.stem[4:].isdecimal()]
    args.seeds = sorted(set(args.seeds or (args.eval_only and trained) or [1]))
    check_earlier(args, settings)
    halves = dict(zip(("base", "novel"), data.halves(dataset.classes)))
    names = {half: [dataset.classes[label] for label in halves[half]] for half in halves}
    texts = {half: data.prompts(args.template, names[half]) for half in halves}
    prompts = {half: model.prompts(dear.tokenize(clip, texts[half])) for half in halves}
    test = {half: data.select(dataset.test, labels) for half, labels in halves.items()}
    shots = {seed: data.select(data.few_shot(dataset.train, dataset.val, args.shots, seed)[0], halves["base"])
             for seed in args.seeds}
    per_class = Counter(item.label for item in shots[args.seeds[0]]).values()
    activation = f"{'QuickGELU' if clip.quick_gelu else 'GELU'} (by {clip.activation_from})"
    print(f"data      {args.dataset}: {len(names['base'])} base and {len(names['novel'])} novel classes, "
          f"{sum(per_class)} training images ({min(per_class)} to {max(per_class)} a class), "
          f"{len(test['base'])} and {len(test['novel'])} test images; split: {dataset.split}\n"
          f"model     {' '.join(filter(None, (clip.name, clip.pretrained)))}, {activation}, "
          f"{sum(p.numel() for p in model.parameters()):,} parameters, "
          f"{sum(p.numel() for p in model.trained().values()):,} of them trained\n"
          f"roles     {model.roles.source}; attributes: {', '.join(model.roles.attributes)}\n"
          f"prompt    {texts['base'][0]!r}\n"
          f"settings  {' '.join(f'{key}={value}' for key, value in vars(args).items())}", flush=True)
    if min(per_class) < args.shots:
        print(f"note: there are classes with fewer than {args.shots} training images")

    clip_row = {half: accuracy(args, clip, test[half], zero_shot(args, model, prompts[half]))["CLIP"]
                for half in halves}
    print(f"zero-shot CLIP: base {clip_row['base']:.2f}, novel {clip_row['novel']:.2f}", flush=True)
    losses, runs = make_losses(args, model, prompts["base"]), []
    for seed in args.seeds:
        final, partial = args.output_dir / f"seed{seed}.pt", args.output_dir / f"seed{seed}.part.pt"
        if args.eval_only or (args.resume and final.exists()):
            saved = dear.read_checkpoint(final, losses=dict, seconds=float)
            model.load_trained(saved["trained"])
            means, seconds = saved["losses"], saved["seconds"]
        else:
            model.reset(torch.Generator().manual_seed(seed), args.alpha_cls)
            means, seconds = train(args, model, losses, shots[seed], seed, settings, partial)
            dear.save_checkpoint(final, model, settings=settings, seed=seed, classes=names["base"],
                                 template=args.template, losses=means, seconds=seconds)
            partial.unlink()
        branches = {half: accuracy(args, clip, test[half], adapted(args, model, prompts[half])) for half in halves}
        runs.append({"seed": seed, **{half: branches[half]["fused"] for half in halves}, "branches": branches,
                     "alpha": dict(zip(("class", *model.roles.attributes), model.alpha.tolist())), "losses": means,
                     "seconds": round(seconds, 2), "checkpoint": str(final)})
    report(args, dataset, model, settings, clip_row, runs)


def report(args, dataset, model, settings, clip_row, runs):
    """Prints the table and writes results.json."""
    halves = ("base", "novel")
    columns = {half: [r[half] for r in runs] for half in halves}
    columns["HM"] = [harmonic_mean(*pair) for pair in zip(columns["base"], columns["novel"])]
    mean = {half: statistics.mean(columns[half]) for half in halves}
    mean["HM"] = harmonic_mean(mean["base"], mean["novel"])                            # of the means, as the field does
    clip_row = {**clip_row, "HM": harmonic_mean(clip_row["base"], clip_row["novel"])}
    std = {name: statistics.stdev(values) for name, values in columns.items()} if len(runs) > 1 else None
    alpha = {name: statistics.mean(r["alpha"][name] for r in runs) for name in runs[0]["alpha"]}

    name, seeds = Path(args.dataset).name, ",".join(str(r["seed"]) for r in runs)
    wide, wide_seeds = max(len(name), len("  attributes")), max(len(seeds), len("seeds"))

    def row(label, cells, shots="", seeds=""):
        print(f"{label:{wide}} {shots:>6}  {seeds:>{wide_seeds}} | " + " ".join(f"{cell:>6}" for cell in cells))
    print()
    row(name, mean, "shots", "seeds")
    row("CLIP", (f"{clip_row[column]:.2f}" for column in mean))
    row("DeAR", (f"{mean[column]:.2f}" for column in mean), args.shots, seeds)
    if std:
        row("  ± std", (f"{std[column]:.2f}" for column in mean))
    for branch in list(runs[0]["branches"]["base"])[1:]:  # the class feature alone, the attribute features alone
        row(f"  {branch}", (f"{statistics.mean(r['branches'][half][branch] for r in runs):.2f}" for half in halves))
    print("\nα  " + "  ".join(f"{name} {value:.3f}" for name, value in alpha.items()))

    cuda = args.device.startswith("cuda")
    results = {
        "config": {**vars(args), "output_dir": str(args.output_dir), "quick_gelu": model.clip.quick_gelu},
        "settings": settings, "split": dataset.split, "roles": model.roles.source,
        "zero_shot": clip_row, "DeAR": mean, "std": std, "alpha": alpha, "runs": runs,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in
                                                             ("torch", "torchvision", "open_clip_torch")}},
        "hardware": torch.cuda.get_device_name() if cuda else f"{platform.machine()} {torch.get_num_threads()} threads",
        "peak_memory_mb": round(torch.cuda.max_memory_allocated() / 2**20 if cuda
                                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                                / (2**20 if sys.platform == "darwin" else 2**10)),
    }
    file = args.output_dir / ("eval.json" if args.eval_only else "results.json")
    part = file.with_suffix(".tmp")
    part.write_text(json.dumps(results, indent=1))
    os.replace(part, file)
    print(f"\ncheckpoint{'s' if len(runs) > 1 else ''}  {' '.join(r['checkpoint'] for r in runs)}\nresults     {file}")


def commit():
    """This code's git commit, marked where files were changed since; None outside a repository."""
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:                                       # no git on this machine
        return None


def main(argv=None):
    parser, args = parse(argv)
    roles.command(parser, run, args, "; the same command with --resume goes on from the last epoch")


if __name__ == "__main__":
    main()
