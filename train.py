"""Trains DeAR on a few labelled images per class and tests it beside zero-shot CLIP, on base and on novel classes.

    python train.py                                       # the bundled demo: no download, no GPU
    python train.py --dataset dtd --shots 16 --seeds 1 2 3
    python train.py --dataset path/to/folder              # one folder of images per class
    python train.py --dataset dtd --eval-only             # tests the checkpoints of an earlier run again

The protocol is CoOp's base-to-novel: trained on the first half of the classes, tested on each half with that half's
names as candidates. What is reported is the last step; nothing is chosen by test accuracy.
"""
import argparse
import json
import math
import os
import platform
import reprlib
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import data
import dear

# What a flag left out becomes: MMRL's published recipe, and for the demo one chosen on other draws of its task.
RECIPE = {"model": "ViT-B-16", "epochs": 10, "batch_size": 4, "lr": 1e-3, "workers": min(8, os.cpu_count())}
SHAPES = {"model": "demo", "epochs": 20, "batch_size": 16, "lr": 5e-3, "workers": 0}
WARMUP_LR = 1e-5                                          # of the first epoch
EVAL_BATCH = 100


def parse(argv):
    """The flags. What has no default here gets one from RECIPE, SHAPES, the data set or the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # What to learn from
    add("--dataset", default="shapes", help=f"{', '.join(data.DATASETS)}, or a folder with one folder per class")
    add("--data-root", "--root", default="data", help="where the data sets lie, in CoOp's layout")
    add("--split", help="a CoOp split file (JSON) to use instead of the data set's own")
    add("--template", help="the prompt, with {} for the class name; default: CoOp's for the data set")
    add("--shots", type=number(int, 1), default=16, help="images per class")
    add("--seeds", "--seed", type=number(int, 0, 10**6), nargs="+", default=[1], help="one run each, for mean and std")
    # The frozen CLIP
    add("--model", "--backbone", help="OpenCLIP's name, or a folder in its format; default: ViT-B-16; demo for shapes")
    add("--pretrained", help="OpenCLIP's tag or a weights file; default: openai")
    add("--quick-gelu", action=argparse.BooleanOptionalAction, help="a weights file's activation; a tag knows its own")
    # The method (dear.py; what the paper leaves open is listed in the README)
    add("--roles", help="a role map, or mixed or generalization for every head; default: the model's, else the paper's")
    add("--text-tokens", type=number(int, 0), default=5, help="K")
    add("--beta", type=number(float, 0, 1), default=0.9, help="share of the learned token in each layer's inserted one")
    add("--alpha-cls", type=number(float, 0.001, 0.999), default=0.7, help="α_cls at the start")
    add("--lambda-reg", type=number(float, 0), help="weight of L_reg; default: MMRL's for the data set, 1 for a folder")
    add("--lambda-fusion", type=number(float, 0), default=0.1, help="weight of L_fusion")
    # The recipe
    add("--epochs", type=number(int, 1, 1000), help="default: 10; 20 for shapes")
    add("--batch-size", type=number(int, 1), help="default: 4, as the relatives; 16 for shapes")
    add("--lr", type=number(float, 0), help="default: 1e-3; 5e-3 for shapes")
    add("--weight-decay", type=number(float, 0), default=5e-4)
    # The machine
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=["fp32", "bf16"], help="autocast of the towers; losses are fp32; default: bf16 on CUDA")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the step; default: on CUDA")
    add("--workers", type=number(int, 0), help="processes that decode images; default: 8 at most, none for shapes")
    add("--output-dir", type=Path, help="default: output/<dataset>/<model>/<shots>shots")
    add("--resume", action="store_true", help="go on from the last epoch of an interrupted run")
    add("--eval-only", action="store_true", help="test the checkpoints in --output-dir")
    args = parser.parse_args(argv)

    cuda = args.device.startswith("cuda")
    recipe = SHAPES if args.dataset == "shapes" else RECIPE
    for key, value in {**recipe, "precision": "bf16" if cuda else "fp32", "compile": cuda}.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    brings_weights = args.model == "demo" or Path(args.model).is_dir()
    args.pretrained = args.pretrained or (None if brings_weights else "openai")
    model = Path(args.model).name + (f"-{Path(args.pretrained).stem}" if args.pretrained else "")
    args.output_dir = args.output_dir or Path("output", Path(args.dataset).name, model, f"{args.shots}shots")
    return parser, args


def number(kind, low, high=math.inf):
    """An argparse type: a number of a kind between two bounds."""
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:                      # nan fails too
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'} "
                                             + (f"from {low} on" if high == math.inf else f"between {low} and {high}"))
        return value
    return read


def device(name):
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:       # torch asserts that it was built with CUDA
        raise argparse.ArgumentTypeError(f"{name!r}: {dear.first_line(error)}") from None
    return name


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


def train(args, model, losses, items, settings, partial):
    """Trains `model` in place on the base classes' items. partial: the file that keeps each epoch, for --resume.

    Returns the last epoch's mean of each loss term. Errors: FloatingPointError where the loss is not finite.
    """
    seed, first = settings["seed"], 0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=args.weight_decay)
    augment = data.transform(model.clip, train=True)
    if args.resume and partial.exists():
        state = dear.read_checkpoint(partial)
        check_settings(partial, state["settings"], settings)
        model.load_trained(state["trained"])
        optimizer.load_state_dict(state["optimizer"])
        first, means = state["epoch"], state["losses"]

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
        dear.save_checkpoint(partial, model, settings=settings, losses=means, epoch=epoch + 1,
                             optimizer=optimizer.state_dict())
    return means


def check_settings(file, saved, settings):
    """Refuses to mix two runs, or to write one over another: `file` must come from these very settings."""
    for key in settings:
        if saved.get(key) != settings[key]:
            was, now = reprlib.repr(saved.get(key)), reprlib.repr(settings[key])
            raise data.InputError(f"{file} was made with {key} {was}, not {now}: give another --output-dir, or move it")


# ---------------------------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def accuracy(args, clip, items, logits):
    """Top-1 accuracy in percent of each branch. logits: images `[B, 3, S, S]` → {branch: `[B, C]`}."""
    right = {}
    for images, labels in tqdm(data.batches(items, data.transform(clip, train=False), EVAL_BATCH, workers=args.workers),
                               "testing", leave=False, disable=None):
        for branch, value in logits(images.to(args.device)).items():
            right[branch] = right.get(branch, 0) + (value.argmax(dim=1).cpu() == labels).sum().item()
    return {branch: 100 * count / len(items) for branch, count in right.items()}


def zero_shot(args, model, prompts):
    """Frozen CLIP's logits, on the same prompts."""
    f_text0 = model.frozen_text(prompts)

    def logits(images):
        with autocast(args):
            f_cls0 = model.frozen_image(model.image_prefix(images))
        return {"CLIP": f_cls0 @ f_text0.T}
    return logits


def adapted(args, model, prompts):
    """DeAR's logits: fused (what is reported), and those of the class feature and of the attribute features alone."""
    with torch.no_grad():
        f_text, alpha, tau = model.adapted_text(prompts), model.alpha, model.clip.tau
    alone = alpha * (torch.arange(len(alpha), device=alpha.device) > 0)

    def logits(images):
        with autocast(args):
            f_cls, f_attr = model.adapted_image(model.image_prefix(images))
        return {"fused": dear.fuse(f_cls, f_attr, f_text, alpha, tau), "class": f_cls @ f_text.T,
                "attributes": dear.fuse(f_cls, f_attr, f_text, alone, tau)}
    return logits


def harmonic_mean(base, novel):
    return 2 * base * novel / (base + novel) if base + novel else 0.0


# --------------------------------------------------------------------------------------------------------------- runs

def record(args):
    """The settings that make a run what it is: all flags but those that say where and how it is run."""
    elsewhere = {"data_root", "device", "workers", "output_dir", "resume", "eval_only", "seeds", "compile"}
    return {key: value for key, value in vars(args).items() if key not in elsewhere}


def choose_roles(args, clip):
    """The role map: --roles, else the one beside the model's weights, else the paper's published heads."""
    beside = dear.DEMO if args.model == "demo" else Path(args.model)
    if args.roles in ("mixed", "generalization"):
        return dear.uniform_roles(args.roles, clip)
    if args.roles or (beside / "roles.json").is_file():
        return dear.read_roles(args.roles or beside / "roles.json", clip)
    return dear.published_roles(clip)


def run(args):
    """One command: zero-shot CLIP, then for each seed few-shot training and testing, the table, results.json."""
    finals = {seed: args.output_dir / f"seed{seed}.pt" for seed in args.seeds}
    if args.eval_only:                                    # the settings are the checkpoint's, not the command's
        saved = dear.read_checkpoint(finals[args.seeds[0]])["settings"]
        vars(args).update({key: saved[key] for key in record(args)})
    dataset, template, lambda_reg = data.load(args.dataset, args.data_root, args.split)
    if len(dataset.classes) < 4:
        raise data.InputError(f"--dataset {args.dataset} has {len(dataset.classes)} classes; base-to-novel needs four")
    args.template = template if args.template is None else args.template
    if args.template.count("{}") != 1 or args.template.count("{") != 1:
        raise data.InputError(f"--template {args.template!r}: needs one {{}} where the class name goes")
    args.lambda_reg = lambda_reg if args.lambda_reg is None else args.lambda_reg
    if args.eval_only:
        model, _ = dear.load_checkpoint(finals[args.seeds[0]], device=args.device)
        clip = model.clip
    else:
        clip = dear.load_clip(args.model, args.pretrained, args.quick_gelu, args.device)
        args.quick_gelu = clip.quick_gelu
        model = dear.DeAR(clip, choose_roles(args, clip), args.text_tokens, args.beta)
    settings = {**record(args), "weights": clip.fingerprint, "visible": model.roles.visible.tolist()}
    for seed, final in finals.items():
        if final.exists():
            check_settings(final, dear.read_checkpoint(final)["settings"], {**settings, "seed": seed})
    halves = dict(zip(("base", "novel"), data.halves(dataset.classes)))
    names = {half: [dataset.classes[label] for label in labels] for half, labels in halves.items()}
    texts = {half: [args.template.format(name.replace("_", " ")) for name in names[half]] for half in halves}
    prompts = {half: model.prompts(dear.tokenize(clip, texts[half])) for half in halves}
    test = {half: data.select(dataset.test, labels) for half, labels in halves.items()}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    print(f"data      {args.dataset}: {len(names['base'])} base and {len(names['novel'])} novel classes, "
          f"{len(test['base'])} and {len(test['novel'])} test images; split: {dataset.split}\n"
          f"model     {clip.name} {clip.pretrained or ''}, {'QuickGELU' if clip.quick_gelu else 'GELU'} "
          f"({clip.activation_from}), {sum(p.numel() for p in model.parameters()):,} parameters, "
          f"{sum(p.numel() for p in model.trained().values()):,} of them trained\n"
          f"roles     {model.roles.source}; attributes: {', '.join(model.roles.attributes)}\n"
          f"prompt    {texts['base'][0]!r}\n"
          f"settings  {' '.join(f'{key}={value}' for key, value in vars(args).items())}", flush=True)

    clip_row = {half: accuracy(args, clip, test[half], zero_shot(args, model, prompts[half]))["CLIP"] for half in halves}
    print(f"zero-shot CLIP: base {clip_row['base']:.2f}, novel {clip_row['novel']:.2f}", flush=True)
    losses, runs = make_losses(args, model, prompts["base"]), []
    for seed, final in finals.items():
        partial, settings["seed"], started = final.with_suffix(".part.pt"), seed, time.time()
        if args.eval_only or (args.resume and final.exists()):
            model, saved = dear.load_checkpoint(final, clip)
            means = saved["losses"]
        else:
            model.reset(torch.Generator().manual_seed(seed), args.alpha_cls)
            shots, _ = data.few_shot(dataset.train, dataset.val, args.shots, seed)
            means = train(args, model, losses, data.select(shots, halves["base"]), settings, partial)
            dear.save_checkpoint(final, model, classes=names["base"], settings=settings, losses=means)
            partial.unlink()
        seconds = time.time() - started
        branches = {half: accuracy(args, clip, test[half], adapted(args, model, prompts[half])) for half in halves}
        runs.append({"seed": seed, **{half: branches[half]["fused"] for half in halves}, "branches": branches,
                     "alpha": dict(zip(("class", *model.roles.attributes), model.alpha.tolist())), "losses": means,
                     "seconds": round(seconds, 2), "checkpoint": str(final)})
    report(args, dataset, model, clip_row, runs)


def report(args, dataset, model, clip_row, runs):
    """Prints the table and writes results.json."""
    columns = {half: [r[half] for r in runs] for half in ("base", "novel")}
    columns["HM"] = [harmonic_mean(*pair) for pair in zip(columns["base"], columns["novel"])]
    mean = {half: statistics.mean(columns[half]) for half in ("base", "novel")}
    mean["HM"] = harmonic_mean(mean["base"], mean["novel"])                            # of the means, as the field does
    clip_row = {**clip_row, "HM": harmonic_mean(clip_row["base"], clip_row["novel"])}
    std = {name: statistics.stdev(values) for name, values in columns.items()} if len(runs) > 1 else None
    alpha = {name: statistics.mean(r["alpha"][name] for r in runs) for name in runs[0]["alpha"]}

    name, seeds = Path(args.dataset).name, ",".join(str(r["seed"]) for r in runs)
    width = max(len(name), 8)
    row = lambda label, shots, seeds, cells: print(
        f"{label:{width}} {shots:>6}  {seeds:>8} | " + " ".join(f"{cell:>6}" for cell in cells))
    print()
    row(name, "shots", "seeds", ("base", "novel", "HM"))
    row("CLIP", "", "", (f"{clip_row[c]:.2f}" for c in mean))
    row("DeAR", args.shots, seeds, (f"{mean[c]:.2f}" for c in mean))
    if std:
        row("  ± std", "", "", (f"{std[c]:.2f}" for c in mean))
    print("\nα  " + "  ".join(f"{name} {value:.3f}" for name, value in alpha.items()))

    cuda = args.device.startswith("cuda")
    results = {
        "config": {**vars(args), "output_dir": str(args.output_dir)}, "split": dataset.split, "roles": model.roles.source,
        "weights": model.clip.fingerprint, "zero_shot": clip_row, "DeAR": mean, "std": std, "alpha": alpha, "runs": runs,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "commit": commit()},
        "hardware": torch.cuda.get_device_name() if cuda else f"{platform.machine()} {torch.get_num_threads()} threads",
        "peak_memory_mb": round(torch.cuda.max_memory_allocated() / 2**20 if cuda
                                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                                / (2**20 if sys.platform == "darwin" else 2**10)),
    }
    file = args.output_dir / "results.json"
    part = file.with_suffix(".tmp")
    part.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    os.replace(part, file)
    print(f"\ncheckpoint{'s' if len(runs) > 1 else ''}  {' '.join(r['checkpoint'] for r in runs)}\nresults     {file}")


def commit():
    """This code's git commit, marked where files were changed since; None outside a repository."""
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40"]
    answer = subprocess.run(git, capture_output=True, text=True)
    return answer.stdout.strip() or None


def main(argv=None):
    parser, args = parse(argv)
    try:
        run(args)
    except (data.InputError, dear.InputError) as error:
        # a loader's worker hands its error over inside a traceback; the message is its last line
        parser.exit(2, f"train.py: error: {str(error).splitlines()[-1].removeprefix('data.InputError: ')}\n")
    except OSError as error:                              # a full disk, a folder that may not be written
        parser.exit(2, f"train.py: error: {error}\n")
    except FloatingPointError as error:
        parser.exit(1, f"train.py: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "train.py: interrupted; the same command with --resume goes on from the last epoch\n")


if __name__ == "__main__":
    main()
