"""Times a training step of DeAR beside a plain one, on random weights and images: no data, no download.

    python bench.py                                       # ViT-B-16; batch 4 and 32; 24, 100 and 500 classes
    python bench.py --batch 4 --classes 24 --steps 5 --no-compile

The plain step is `plain_features` below, as the relatives compute it, eagerly; ours is train.make_step, eager, compiled
and with kept views. That both agree, in the loss and in every gradient, is checked before anything is timed. Each
configuration runs in a process of its own; there the steps take turns, and what is printed is a median.
"""
import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import data
import dear
import roles
import train

# glibc else gives large buffers back after a step and faults them in again in the next: at many classes a third of the
# plain step's time. Everything here runs under the same settings.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "67108864"}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}                  # of the check: of the largest gradient
COLUMNS = "step  ms  images/s  ratio  GFLOP  of GEMM rate  peak MB  compile s".split("  ")


def plain_features(model, images, ids):
    """What `model(images, prompts)` gives, with nothing shared, kept or left out: two full image towers, and a full
    text tower over every class, ids `[C, context]`; every row of every layer."""
    clip, K = model.clip, len(model.text_tokens)
    with torch.no_grad():
        f_cls0 = clip.encode_image(images)

    x, J = clip.visual.embed(images), len(model.image_blocks) - dear.ADAPTED_LAYERS    # image tower
    B, N, _ = x.shape
    for l, block in enumerate(model.image_blocks):
        attend = F.scaled_dot_product_attention
        if l == J:
            x = torch.cat([x, model.attr_tokens.expand(B, -1, -1)], dim=1)
        if l > J:
            x = torch.cat([x[:, :N], model.beta * model.attr_tokens + (1 - model.beta) * x[:, N:]], dim=1)
        if l >= J:
            attend = dear.role_attention(model.roles.visible[l - J].to(x.device), N, flex=False)
        x = block(x, attend)
    f_cls, f_attr = clip.visual.head(x[:, 0]), clip.visual.ln_post(x[:, N:]) @ model.attr_proj

    x, J = clip.text_embed(ids), len(model.text_blocks) - dear.ADAPTED_LAYERS          # text tower
    for l, block in enumerate(model.text_blocks):
        if l == J:
            x = torch.cat([x[:, :1], model.text_tokens.expand(len(x), -1, -1), x[:, 1:]], dim=1)
        if l > J:
            r = model.beta * model.text_tokens + (1 - model.beta) * x[:, 1:1 + K]
            x = torch.cat([x[:, :1], r, x[:, 1 + K:]], dim=1)
        x = block(x, dear.causal)
    f_text = clip.text_head(x[torch.arange(len(x)), ids.argmax(dim=1) + K])
    return [dear.normalize(feature) for feature in (f_cls, f_attr, f_text, f_cls0)]


def alternating(clip):
    """A role map with every role in every layer, so that no layer is spared."""
    rows = [dear.role_row(role, dear.ATTRIBUTES) for role in (*dear.ATTRIBUTES, "mixed", "generalization")]
    one = torch.tensor([rows[h % len(rows)] for h in range(clip.heads)])
    return dear.Roles(dear.ATTRIBUTES, one.expand(dear.ADAPTED_LAYERS, -1, -1), "every role in every layer")


def peak_mb(args):
    if args.device.startswith("cuda"):
        peak, _ = torch.cuda.max_memory_allocated() / 2**20, torch.cuda.reset_peak_memory_stats()
        return round(peak)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))


def measure(args, batch, classes):
    """One configuration → {step: {column: value}}. Steps: plain, ours, views, and compiled ones."""
    generator = torch.Generator().manual_seed(1)
    clip = dear.load_clip(args.model, args.weights, quick_gelu=True, device=args.device)
    table = dear.read_roles(args.roles, clip) if args.roles else alternating(clip)
    model = dear.DeAR(clip, table, generator=generator)
    names = [open_clip.IMAGENET_CLASSNAMES[c % 1000] for c in range(classes)]
    texts = data.prompts("a photo of a {}.", names)
    prompts = model.prompts(dear.tokenize(clip, texts))
    ids = open_clip.SimpleTokenizer(context_length=clip.context_length)(texts).to(args.device)
    images = torch.randn(batch, 3, clip.image_size, clip.image_size, generator=generator).to(args.device)
    labels = torch.randint(classes, (batch,), generator=generator).to(args.device)
    optimizer = train.make_optimizer(args, model)
    with train.autocast(args):
        f_text0 = model.frozen_text(prompts)

    def plain(images, labels):
        with train.autocast(args):
            features = plain_features(model, images, ids)
        loss = train.objective(args, model, features, f_text0, labels)[0]
        loss.backward()
        optimizer.step()
        return loss.detach()[None]

    eager = train.make_step(argparse.Namespace(**{**vars(args), "compile": False}), model, prompts, optimizer)
    steps = {"ours": (eager, images), "plain": (plain, images)}
    found, first, began = {}, {}, {name: tensor.clone() for name, tensor in model.trained().items()}
    for name, (step, seen) in steps.items():              # ours first: the peak of a process only grows
        model.load_trained(began)
        optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            loss = step(seen, labels)[0]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        first[name] = [loss, *[grad.clone() for grad in grads]]
        found[name] = {"GFLOP": counter.get_total_flops() / 1e9, "peak MB": peak_mb(args), "compile s": None}
    for one, other in zip(first["plain"], first["ours"]):
        gap = ((one - other).abs().max() / one.abs().max()).item()
        if not gap <= TOLERANCE[args.precision]:
            sys.exit(f"bench.py: the two steps disagree: a loss or gradient of shape {tuple(one.shape)} by {gap:.1e}")

    with train.autocast(args):
        kept = model.frozen_image(images)
    steps["ours, kept views"] = eager, kept
    with FlopCounterMode(display=False) as counter:
        eager(kept, labels)
    found["ours, kept views"] = {"GFLOP": counter.get_total_flops() / 1e9, "peak MB": None, "compile s": None}
    if args.compile:
        whole = train.make_step(args, model, prompts, optimizer)
        for name, seen in (("ours", images), ("ours, kept views", kept)):
            start = time.perf_counter()
            optimizer.zero_grad()
            whole(seen, labels)
            steps[f"{name}, compiled"] = whole, seen
            found[f"{name}, compiled"] = {**found[name], "peak MB": None, "compile s": time.perf_counter() - start}

    width, rows = clip.visual.proj.shape[0], batch * clip.visual.positional_embedding.shape[0]
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    a, b = torch.randn(rows, width, dtype=dtype), torch.randn(width, 4 * width, dtype=dtype)
    a, b = a.to(args.device), b.to(args.device)
    times = {name: [] for name in ("gemm", *steps)}
    for _ in range(args.steps):
        for name in times:
            if name != "gemm":
                optimizer.zero_grad()
            sync(args)
            start = time.perf_counter()
            if name == "gemm":
                for _ in range(10):
                    a @ b
            else:
                steps[name][0](steps[name][1], labels)
            sync(args)
            times[name].append(time.perf_counter() - start)
    rate = 10 * 2 * a.numel() * b.shape[1] / statistics.median(times["gemm"])
    for name in steps:
        seconds = statistics.median(times[name])
        found[name] = {"step": name, "ms": 1000 * seconds, "images/s": batch / seconds,
                       "ratio": statistics.median(times["plain"]) / seconds, **found[name],
                       "of GEMM rate": found[name]["GFLOP"] * 1e9 / seconds / rate, "spread ms": [
                           1000 * min(times[name]), 1000 * max(times[name])]}
    return {"batch": batch, "classes": classes, "GEMM GFLOP/s": rate / 1e9, "steps": list(found.values())}


def sync(args):
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()


def parse(argv):
    parser = argparse.ArgumentParser("bench.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="ViT-B-16", help="OpenCLIP's name; its weights are random here")
    add("--batch", type=roles.number(int, 1, 10**4), nargs="+", default=[4, 32])
    add("--classes", type=roles.number(int, 2, 10**5), nargs="+", default=[24, 100, 500])
    add("--steps", type=roles.number(int, 1, 10**4), default=20, help="of each kind that are timed")
    add("--roles", help="a role map; default: every role in every layer")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled steps, too")
    add("--device", type=roles.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=list(TOLERANCE), help="default: bf16 on CUDA")
    add("--output", type=Path, default=Path("bench.json"))
    add("--weights", help=argparse.SUPPRESS)              # of the processes that measure
    args = parser.parse_args(argv)
    vars(args).update(lr=1e-3, weight_decay=5e-4, lambda_reg=6.0, lambda_fusion=0.1)
    args.precision = args.precision or ("bf16" if args.device.startswith("cuda") else "fp32")
    return parser, args


def run(args):
    if args.weights:
        print(json.dumps(measure(args, args.batch[0], args.classes[0])))
        return
    hardware = (torch.cuda.get_device_name(args.device) if args.device.startswith("cuda")
                else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    record = {"command": " ".join(["python bench.py", *sys.argv[1:]]), "model": args.model, "hardware": hardware,
              "precision": args.precision, "torch": torch.__version__, "allocator": ALLOCATOR, "measured": []}
    print("\n".join(f"{key:10} {value}" for key, value in record.items() if key != "measured"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random.pt"
        torch.manual_seed(0)                              # open_clip initialises from the global generator only
        torch.save(open_clip.create_model(args.model).state_dict(), weights)
        for batch in args.batch:
            for classes in args.classes:
                one = [sys.executable, __file__, *sys.argv[1:], "--weights", weights, "--batch", batch, "--classes", classes]
                done = subprocess.run(map(str, one), stdout=subprocess.PIPE, text=True, env={**os.environ, **ALLOCATOR})
                if done.returncode:
                    sys.exit(done.returncode)
                record["measured"].append(json.loads(done.stdout.splitlines()[-1]))
                show(record["measured"][-1])
    train.write_json(args.output, record)
    print(f"\n{args.output}")


def show(found):
    print(f"\nbatch {found['batch']}, {found['classes']} classes; GEMM {found['GEMM GFLOP/s']:.0f} GFLOP/s")
    print(" ".join([f"{COLUMNS[0]:26}", *[f"{column:>12}" for column in COLUMNS[1:]]]))
    for step in found["steps"]:
        shown = [f"{step['ms']:.1f}", f"{step['images/s']:.1f}", f"{step['ratio']:.2f}", f"{step['GFLOP']:.0f}",
                 f"{step['of GEMM rate']:.0%}", step["peak MB"] or "", step["compile s"] and f"{step['compile s']:.0f}" or ""]
        print(" ".join([f"{step['step']:26}", *[f"{cell:>12}" for cell in shown]]), flush=True)


def main(argv=None):
    parser, args = parse(argv)
    roles.command(parser, run, args)


if __name__ == "__main__":
    main()
