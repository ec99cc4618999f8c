"""DeAR: Fine-Grained VLM Adaptation by Decomposing Attention Head Roles (CVPR 2026, arXiv 2603.01111).

    clip = load_clip("ViT-B-16", "openai")                            # frozen, QuickGELU as the tag asks
    roles = read_roles("my_roles.json", clip)                         # who may see which attribute token
    model = DeAR(clip, roles)
    prompts = model.prompts(tokenize(clip, ["banded texture.", "dotted texture."]))
    f_cls, f_attr, f_text, f_cls0 = model(images, prompts)            # [B, E], [B, A, E], [C, E], [B, E]
    logits = fuse(f_cls, f_attr, f_text, model.alpha, clip.tau)       # [B, C]

    paper          here                 shape
    r_attr         model.attr_tokens    [A, D_v]      learned, after CLS and patches from layer J on
    r_text         model.text_tokens    [K, D_t]      learned, after BOT from layer J on
    W_attr         model.attr_proj      [D_v, E]      learned, starts as CLIP's own image projection
    w, α           model.w, .alpha      [1 + A]       learned; α = softmax(w), α[0] is the class feature's
    role mask      roles.visible        [L-J+1, H, A] may original tokens of (layer, head) see attribute token a?
    τ              clip.tau             []            exp(logit_scale), frozen

Sizes: B images, C classes, N = 1 + patches original image tokens, T text tokens, H heads, D width, E joint width.
The paper counts layers from 1 and heads from 0; `resblocks[0]` is layer 1. J is the first of the last four layers.
Mask polarity: True means "may attend" everywhere in this file, as in `scaled_dot_product_attention`.
"""
import hashlib
import io
import json
import os
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import open_clip
import torch
import torch.nn.functional as F
from einops import pack, rearrange, repeat, unpack
from torch import nn
from torch.nn.attention.flex_attention import create_mask, flex_attention

ADAPTED_LAYERS = 4                        # J..L: the last four layers of each tower (paper: 9 to 12 of ViT-B/16)
ATTRIBUTES = ("color", "shape", "texture", "object", "location")                      # the paper's five core attributes
ROLES = ("mixed", "generalization", "expert", "attribute")
DEMO = Path(__file__).resolve().with_name("demo")


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line: what is wrong, where, and what to do."""


# ---------------------------------------------------------------------------------------------- roles and their mask

class Roles(NamedTuple):
    """The role map of a checkpoint, as one table.

    attributes: A names, in the order of the attribute tokens. visible: bool `[layers, H, A]` for layers J..L; a mixed
    head's row is all True, a generalization head's all False, an attribute head's one-hot. source: for the record.
    """
    attributes: tuple
    visible: torch.Tensor
    source: str


def role_row(role, attributes):
    """One head's row of the table `[A]`. role: "mixed", "generalization" or the name of an attribute."""
    return [role == "mixed" or role == attribute for attribute in attributes]


def uniform_roles(role, clip):
    """Every head of layers J..L in the same role: "mixed" is plain insertion, "generalization" shuts the tokens out."""
    rows = [[role_row(role, ATTRIBUTES)] * clip.heads] * ADAPTED_LAYERS
    return Roles(ATTRIBUTES, torch.tensor(rows, dtype=torch.bool), f"every head {role}")


def check_attributes(attributes, where):
    taken = (*ROLES, "class")
    if (not isinstance(attributes, list) or not all(name and isinstance(name, str) for name in attributes)
            or len(set(attributes)) < len(attributes) or set(attributes) & set(taken)):
        raise InputError(f"{where}: `attributes` must be a list of different names, none of {', '.join(taken)}")


def read_roles(path, clip):
    """Reads a role map: JSON with `attributes`, and under `map` a role for every head "L9 H0" of layers J..L.

    A role is "mixed", "generalization", "expert" (of a concept that is no attribute: isolated, like generalization) or
    "attribute", which names its `attribute`. Errors: InputError, naming the head.
    """
    try:
        file = json.loads(Path(path).read_text())
        attributes, heads = list(file["attributes"]), {name: dict(head) for name, head in file["map"].items()}
    except OSError as error:
        raise InputError(f"role map {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"role map {path} is not a JSON role map ({type(error).__name__}: {error})") from None
    check_attributes(file["attributes"], f"role map {path}")
    if file.get("fingerprint", clip.fingerprint) != clip.fingerprint:
        raise InputError(f"role map {path} was computed for other weights ({file.get('model')} "
                         f"{file.get('pretrained')}): compute these weights' own with roles.py, or take `fingerprint` "
                         "out of the map to use it all the same")
    first = clip.layers - ADAPTED_LAYERS + 1
    expected = [f"L{layer} H{head}" for layer in range(first, clip.layers + 1) for head in range(clip.heads)]
    missing, extra = [h for h in expected if h not in heads], [h for h in heads if h not in expected]
    if missing or extra:
        what = f"has no role for {missing[0]}" if missing else f"has a role for {extra[0]}"
        raise InputError(f"role map {path} {what}; {clip.name} needs layers {first}-{clip.layers}, "
                         f"heads 0-{clip.heads - 1}: is it another model's?")
    rows = []
    for name in expected:
        role, attribute = heads[name].get("role"), heads[name].get("attribute")
        if role not in ROLES:
            raise InputError(f"role map {path}, {name}: unknown role {role!r}; "
                             "use mixed, generalization, expert or attribute")
        if role == "attribute" and attribute not in attributes:
            raise InputError(f"role map {path}, {name}: attribute {attribute!r} is not among {attributes}")
        rows.append(role_row(attribute if role == "attribute" else role, attributes))
    visible = torch.tensor(rows, dtype=torch.bool).view(ADAPTED_LAYERS, clip.heads, len(attributes))
    for a, attribute in enumerate(attributes):
        if not visible[..., a].any():
            raise InputError(f"role map {path}: no head may see attribute {attribute!r}; "
                             "give it a head or take it out of `attributes`")
    return Roles(tuple(attributes), visible, f"{path} ({file.get('note', 'no note')})")


def role_mask(shown):
    """The role-based mask as a flex_attention score_mod: query i and key j meet iff both are shown, or neither is.

    shown: bool `[H, N + A]`, is this token visible to original tokens in this head? (originals always are). What is
    shut out still sees itself and the others shut out, so no row is ever all -inf, and nothing crosses.
    """
    def score_mod(score, batch, head, query, key):
        return torch.where(shown[head, query] == shown[head, key], score, -torch.inf)
    return score_mod


compiled_flex_attention = torch.compile(flex_attention)          # at its first call; uncompiled it is a slow oracle


def role_attention(visible, tokens, flex, rows=slice(None)):
    """How queries meet keys in one layer. visible: `[H, A]`; tokens: N; rows: which of the N + A tokens are queries.
    Returns `(q, k, v) -> out`, `[B, H, rows, d]`.

    One rule, two executors: flex_attention with the score_mod on CUDA; elsewhere the same score_mod, expanded once to a
    dense mask for scaled_dot_product_attention, because FlexAttention has no backward on CPU and MPS (torch 2.14).
    """
    H, A = visible.shape
    shown = torch.cat([visible.new_ones(H, tokens), visible], dim=1)
    if flex:
        return partial(compiled_flex_attention, score_mod=role_mask(shown))
    mask = create_mask(role_mask(shown), 1, H, tokens + A, tokens + A, device=visible.device)
    return partial(F.scaled_dot_product_attention, attn_mask=mask[:, :, rows])


causal = partial(F.scaled_dot_product_attention, is_causal=True)
CLS = slice(None), slice(0, 1)                                   # rows of `[B, N, D]`


# --------------------------------------------------------------------------- CLIP's two towers, OpenCLIP's key names

class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def project(self, x, rows):
        D = x.shape[-1]
        (W_q, W_kv), (b_q, b_kv) = [t.split([D, 2 * D]) for t in (self.in_proj_weight, self.in_proj_bias)]
        q = rearrange(F.linear(x[rows], W_q, b_q), "b n (h d) -> b h n d", h=self.heads)
        return q, *rearrange(F.linear(x, W_kv, b_kv), "b n (two h d) -> two b h n d", two=2, h=self.heads)

    def forward(self, q, k, v, attend):
        return self.out_proj(rearrange(attend(q, k, v), "b h n d -> b n (h d)"))


class MLP(nn.Module):
    def __init__(self, width, ratio, quick_gelu):
        super().__init__()
        self.c_fc = nn.Linear(width, int(width * ratio))
        self.c_proj = nn.Linear(int(width * ratio), width)
        self.quick_gelu = quick_gelu

    def forward(self, x):
        x = self.c_fc(x)
        return self.c_proj(x * torch.sigmoid(1.702 * x) if self.quick_gelu else F.gelu(x))


class Block(nn.Module):
    """One pre-norm layer: x `[B, N, D]` → `[B, rows, D]`.

    attend: how queries meet keys: plain, causal or a role mask. rows: an index into x: what is read of the output; the
    other tokens are only keys and values. qkv: what stands in for x's own queries, keys and values.
    """
    def __init__(self, width, heads, mlp_ratio, quick_gelu):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width, mlp_ratio, quick_gelu)

    def qkv(self, x, rows=slice(None)):
        """Queries of `rows`, keys and values of all of x: three of `[B, H, n, d]`."""
        return self.attn.project(self.ln_1(x), rows)

    def forward(self, x, attend=F.scaled_dot_product_attention, rows=slice(None), qkv=None):
        x = x[rows] + self.attn(*(qkv or self.qkv(x, rows)), attend)
        return x + self.mlp(self.ln_2(x))


def together(first, second):
    """Queries, keys or values of two groups of tokens, `[B or 1, H, n, d]` each → `[B, H, n + m, d]`."""
    B = max(len(first[0]), len(second[0]))
    return [torch.cat([t.expand(B, -1, -1, -1) for t in pair], dim=2) for pair in zip(first, second)]


class Transformer(nn.Module):
    def __init__(self, width, layers, heads, mlp_ratio, quick_gelu):
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads, mlp_ratio, quick_gelu) for _ in range(layers))


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim, quick_gelu, image_size, patch_size, width, layers, head_width, mlp_ratio):
        super().__init__()
        patches = (image_size // patch_size) ** 2
        self.conv1 = nn.Conv2d(3, width, patch_size, stride=patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(1 + patches, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, width // head_width, mlp_ratio, quick_gelu)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, embed_dim))

    def embed(self, images):
        """`[B, 3, S, S]` → the tokens that enter layer 1, `[B, N, D_v]`."""
        x = rearrange(self.conv1(images), "b d y x -> b (y x) d")
        cls = repeat(self.class_embedding, "d -> b 1 d", b=len(x))
        return self.ln_pre(torch.cat([cls, x], dim=1) + self.positional_embedding)

    def head(self, x):
        """Rows of the last layer's output `[..., D_v]` → features `[..., E]`, not normalised."""
        return self.ln_post(x) @ self.proj


class CLIP(nn.Module):
    """A CLIP of OpenCLIP's plain family (ViT + causal text transformer), with OpenCLIP's parameter names.

    config: an OpenCLIP model configuration. Parameters are uninitialised: `load_clip` fills them.
    """
    def __init__(self, config, quick_gelu):
        super().__init__()
        image = {"image_size": 224, "patch_size": 16, "width": 768, "layers": 12, "head_width": 64, "mlp_ratio": 4.0,
                 **config["vision_cfg"]}                         # what a configuration leaves out, as in open_clip
        text = {"context_length": 77, "vocab_size": 49408, "width": 512, "layers": 12, "heads": 8, "mlp_ratio": 4.0,
                **config["text_cfg"]}
        self.visual = VisionTransformer(config["embed_dim"], quick_gelu, **image)
        self.token_embedding = nn.Embedding(text["vocab_size"], text["width"])
        self.positional_embedding = nn.Parameter(torch.empty(text["context_length"], text["width"]))
        self.transformer = Transformer(text["width"], text["layers"], text["heads"], text["mlp_ratio"], quick_gelu)
        self.ln_final = nn.LayerNorm(text["width"])
        self.text_projection = nn.Parameter(torch.empty(text["width"], config["embed_dim"]))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.layers, self.heads = image["layers"], image["width"] // image["head_width"]
        self.image_size, self.context_length = image["image_size"], text["context_length"]
        self.quick_gelu = quick_gelu

    @property
    def tau(self):
        return self.logit_scale.exp()

    def text_embed(self, tokens):
        """Token ids `[C, T]`, T up to the context length → what enters layer 1, `[C, T, D_t]`."""
        return self.token_embedding(tokens) + self.positional_embedding[:tokens.shape[1]]

    def text_head(self, x):
        return self.ln_final(x) @ self.text_projection

    def encode_image(self, images):
        """open_clip's encode_image: `[B, 3, S, S]` → `[B, E]`, not normalised."""
        x = self.visual.embed(images)
        for block in self.visual.transformer.resblocks:
            x = block(x)
        return self.visual.head(x[:, 0])

    def encode_text(self, tokens):
        """open_clip's encode_text: ids `[C, T]` → `[C, E]`, not normalised. The mask is causal and the feature is read
        at EOT, the greatest id, so that what follows the longest prompt's EOT may be trimmed."""
        x = self.text_embed(tokens)
        for block in self.transformer.resblocks:
            x = block(x, causal)
        return self.text_head(x[torch.arange(len(x)), tokens.argmax(dim=1)])


def load_clip(model="ViT-B-16", pretrained=None, quick_gelu=None, device="cpu"):
    """Loads a frozen CLIP by OpenCLIP's names.

    model: a configuration of OpenCLIP ("ViT-B-16"), or a folder with configuration and weights in OpenCLIP's format,
    such as "demo". pretrained: a tag from OpenCLIP's hub, or a file (.pt, .bin, .safetensors, OpenAI's
    TorchScript archive). quick_gelu: the activation; None takes it from the tag (open_clip 3.3.0 only warns there and
    builds GELU for ViT-B-16 + openai), from the archive (OpenAI's is QuickGELU), or from the configuration.
    Returns a CLIP with `name`, `pretrained`, `folder` (where it brings its weights), `activation_from`, `fingerprint`
    and its preprocessing (`mean`, `std`, `squash`). Errors: InputError.
    """
    model, pretrained = str(model), pretrained and str(pretrained)
    folder = weights_folder(model)
    if folder:
        if pretrained:
            raise InputError(f"--pretrained {pretrained}: {model} brings its own weights; leave it out")
        config, tag, path = read_folder(folder)
    else:
        config, tag, path = find_pretrained(model, pretrained)
    scripted = path.suffix != ".safetensors" and is_torchscript(path)
    if quick_gelu is not None:
        activation_from = "--quick-gelu"
    elif scripted:
        quick_gelu, activation_from = True, "OpenAI's archive"
    elif tag and "quick_gelu" in tag:
        quick_gelu, activation_from = tag["quick_gelu"], f"the tag {pretrained}"
    else:
        quick_gelu, activation_from = config.get("quick_gelu", False), f"the configuration {model}"
    try:
        with torch.device("meta"):
            clip = CLIP(config, quick_gelu)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise InputError(f"--model {model}: its configuration makes no CLIP ({first_line(error)})") from None
    if min(clip.layers, len(clip.transformer.resblocks)) <= ADAPTED_LAYERS:
        raise InputError(f"--model {model}: DeAR adapts the last {ADAPTED_LAYERS} layers of each tower and needs more")
    clip.load_state_dict(read_weights(path, scripted, clip), assign=True)
    clip.name, clip.pretrained, clip.activation_from = model, pretrained, activation_from
    clip.folder = folder
    clip.mean = tuple(tag.get("mean") or open_clip.OPENAI_DATASET_MEAN)                # a few LAION tags have others
    clip.std = tuple(tag.get("std") or open_clip.OPENAI_DATASET_STD)
    mode, interpolation = tag.get("resize_mode", "shortest"), tag.get("interpolation", "bicubic")
    clip.squash = mode == "squash"                               # DFN's ViT-H-14: resized without regard to aspect
    if (len(clip.mean), len(clip.std), interpolation) != (3, 3, "bicubic") or mode not in ("shortest", "squash"):
        raise InputError(f"--model {model}: this preprocessing is not supported: {tag}")
    clip.fingerprint = fingerprint(clip)
    return clip.requires_grad_(False).eval().to(device)


def weights_folder(model):
    """Where a model brings its own weights; None for a name of OpenCLIP's, which needs a tag or a file."""
    folder = DEMO if model == "demo" else Path(model)
    return folder if os.path.isdir(folder) else None             # Path.is_dir raises where a name is too long


def fingerprint(clip):
    """Twelve hex digits that tell one checkpoint from another: of all its weights and its preprocessing."""
    digest = hashlib.sha256(repr((clip.mean, clip.std, clip.squash)).encode())
    for name, tensor in sorted(clip.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy())
    return digest.hexdigest()[:12]


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_folder(folder):
    """A folder in OpenCLIP's format → configuration, its preprocessing (mean, std), weights file."""
    names = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
    weights = [folder / name for name in names if (folder / name).is_file()]
    if not weights:
        raise InputError(f"{folder} holds neither {' nor '.join(names)}")
    try:
        file = json.loads((folder / "open_clip_config.json").read_text())
        config, preprocess = file["model_cfg"], dict(file.get("preprocess_cfg") or {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}/open_clip_config.json is not an OpenCLIP configuration ({error!r})") from None
    check_config(folder, config)
    return config, preprocess, weights[0]


def find_pretrained(name, pretrained):
    """OpenCLIP's name and a tag or file → configuration, the tag's record ({} for a file), weights file."""
    known = name.replace("/", "-")                               # CLIP's own spelling: ViT-B/16
    config, tag = open_clip.get_model_config(known), open_clip.get_pretrained_cfg(known, pretrained or "")
    if config is None:
        raise InputError(f"--model {name} is neither a folder nor a configuration of OpenCLIP, "
                         "such as ViT-B-16, ViT-B-32, ViT-L-14, ViT-L-14-336")
    check_config(name, config)
    if not tag and not os.path.isfile(pretrained or ""):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(known)) or "none"
        raise InputError(f"--pretrained {pretrained}: neither a file nor a tag of {name}; its tags: {tags}")
    try:
        return config, tag, Path(open_clip.download_pretrained(tag) if tag else pretrained)
    except Exception as error:
        option = "--pretrained FILE --quick-gelu" if tag.get("quick_gelu") else "--pretrained FILE"
        raise InputError(f"cannot download {name} {pretrained} ({first_line(error)}); without a network, copy the "
                         f"weights here and give {option}") from None


def check_config(model, config):
    """Refuses what this from-scratch CLIP does not compute, by the names of the configuration's own fields."""
    known = {"": {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg"},
             "vision_cfg": {"layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"},
             "text_cfg": {"layers", "width", "heads", "mlp_ratio", "context_length", "vocab_size"}}
    if not isinstance(config, dict) or not all(isinstance(config.get(part), dict) for part in known if part):
        raise InputError(f"--model {model}: its configuration has no vision_cfg or no text_cfg")
    other = [f"{part}.{key}" if part else key for part in known for key in (config[part] if part else config)
             if key not in known[part]]
    if isinstance(config["vision_cfg"].get("layers"), list):
        other = ["a ResNet"]
    if config["text_cfg"].get("vocab_size", 49408) != 49408:
        other += ["another vocabulary"]
    if not isinstance(config.get("quick_gelu", False), bool) or "embed_dim" not in config:
        other += ["no embed_dim, or a quick_gelu that is neither true nor false"]
    if other:
        raise InputError(f"--model {model} is not supported: it has {', '.join(other)}; DeAR needs OpenCLIP's plain "
                         "ViT with its causal text transformer (ViT-B-16, ViT-B-32, ViT-L-14, ViT-H-14 ...)")


def is_torchscript(path):
    """OpenAI published its weights as TorchScript archives: a zip with code in it."""
    try:
        return any("/code/" in name for name in zipfile.ZipFile(path).namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def read_weights(path, scripted, clip):
    """A state dict in float32 that fits `clip` exactly. Errors: InputError, with the first key that does not fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                      # torch.jit is deprecated, OpenAI's file is not
            state = open_clip.factory.load_state_dict(str(path), weights_only=not scripted)
        found = {key: tuple(value.shape) for key, value in state.items()}
    except Exception as error:                                   # unpickling and safetensors raise types of their own
        raise InputError(f"{path} is not a readable weights file ({first_line(error)})") from None
    expected = {key: tuple(value.shape) for key, value in clip.state_dict().items()}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise InputError(f"{path} does not fit the model: {key} is {found.get(key, 'missing')} in the file and "
                             f"{expected.get(key, 'unknown')} in the configuration; is --model the right one?")
        if not (state[key].is_floating_point() and state[key].isfinite().all()):
            raise InputError(f"{path}: {key} holds values that are no finite numbers")
    return {key: value.float() for key, value in state.items()}


class Tokens(NamedTuple):
    """Prompts as ids `[C, T]`, trimmed to the longest, and where each one's EOT stands, `[C]`."""
    ids: torch.Tensor
    eot: torch.Tensor


def tokenize(clip, texts):
    """Texts → Tokens for `clip`'s text tower. Errors: InputError where a text is longer than the tower reads."""
    tokenizer = open_clip.SimpleTokenizer(context_length=clip.context_length)
    for text in texts:
        if len(tokenizer.encode(text)) + 2 > clip.context_length:                      # BOT and EOT
            raise InputError(f"the prompt {text!r} is longer than this text tower reads ({clip.context_length} tokens)")
    ids = tokenizer(list(texts)).to(clip.logit_scale.device)
    eot = ids.argmax(dim=1)
    return Tokens(ids[:, :int(eot.max()) + 1], eot)


# ------------------------------------------------------------------------------------------------------------- DeAR

class Prompts(NamedTuple):
    """Class prompts as they enter layer J of the text tower, in chunks of classes of like length.

    chunks: (x `[c, T, D_t]` trimmed to the chunk's longest, where each one's EOT stands `[c]`); order `[C]`: where in
    the chunks each class is.
    """
    chunks: list
    order: torch.Tensor


class DeAR(nn.Module):
    """CLIP with attribute and text tokens from layer J on, a role mask, and learned fusion weights (paper, section 3).

    clip: a frozen CLIP, on its device already. roles: a Roles table for it. K: text tokens. beta: how much of the
    learned token each layer's inserted tokens are made of. alpha_cls: where the class feature's fusion weight starts.
    chunk: classes that run through the text tower side by side. flex: the executor; None means flex_attention on CUDA only.
    """
    def __init__(self, clip, roles, K=5, beta=0.9, alpha_cls=0.7, generator=None, chunk=128, flex=None):
        super().__init__()
        if roles.visible.shape != (ADAPTED_LAYERS, clip.heads, len(roles.attributes)):
            raise InputError(f"roles of shape {tuple(roles.visible.shape)} do not fit {clip.heads} heads")
        self.clip, self.roles, self.beta, self.chunk = clip, roles, beta, chunk
        # lists: `clip` owns the modules
        self.image_blocks, self.text_blocks = list(clip.visual.transformer.resblocks), list(clip.transformer.resblocks)
        open_to = roles.visible.flatten(1).any(dim=1).tolist() + [True]
        self.closed = open_to.index(True)                        # of layers J..L, the first ones with isolated heads only
        N, D_v = clip.visual.positional_embedding.shape
        A, D_t, device = len(roles.attributes), clip.positional_embedding.shape[1], clip.logit_scale.device
        self.attr_tokens = nn.Parameter(torch.empty(A, D_v, device=device))
        self.text_tokens = nn.Parameter(torch.empty(K, D_t, device=device))
        self.attr_proj = nn.Parameter(torch.empty_like(clip.visual.proj))
        self.w = nn.Parameter(torch.empty(1 + A, device=device))
        self.reset(generator, alpha_cls)
        flex = device.type == "cuda" if flex is None else flex
        self.read = torch.tensor([0, *range(N, N + A)], device=device)                 # of the last layer: CLS, attributes
        *rest, last = roles.visible.to(device)
        self.image_attention = [role_attention(visible, N, flex) for visible in rest]
        self.image_attention += [role_attention(last, N, False, self.read)]            # few queries: a small dense mask

    @torch.no_grad()
    def reset(self, generator=None, alpha_cls=0.7):
        """Draws the tokens from N(0, 0.02²), copies CLIP's projection, and gives the class feature weight alpha_cls."""
        A = len(self.attr_tokens)
        self.attr_tokens.copy_(0.02 * torch.randn(self.attr_tokens.shape, generator=generator))
        self.text_tokens.copy_(0.02 * torch.randn(self.text_tokens.shape, generator=generator))
        self.attr_proj.copy_(self.clip.visual.proj)
        self.w.copy_(torch.tensor([alpha_cls] + [(1 - alpha_cls) / A] * A if A else [1.0]).log())

    @property
    def alpha(self):
        return self.w.softmax(dim=0)

    def trained(self):
        """The four tensors that are trained, by name."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, images, prompts):
        """images `[B, 3, S, S]`, or what frozen_image gave for them; prompts of C classes → f_cls `[B, E]`, f_attr
        `[B, A, E]`, f_text `[C, E]` and frozen CLIP's f_cls0 `[B, E]` of the same images, all normalised."""
        x, f_cls0 = self.frozen_image(images) if torch.is_tensor(images) else images
        f_cls, f_attr = self.adapted_image(x)
        return f_cls, f_attr, self.adapted_text(prompts), f_cls0

    @torch.no_grad()
    def load_trained(self, tensors):
        """Takes over the four trained tensors. Errors: InputError where a name or a shape is not this model's,
        or a value not finite."""
        own = self.trained()
        for name in own.keys() | tensors.keys():
            shapes = [tuple(getattr(t.get(name), "shape", ["missing"])) for t in (own, tensors)]
            if shapes[0] != shapes[1]:
                raise InputError(f"checkpoint does not fit: {name} is {shapes[1]} there and {shapes[0]} in this model")
            if not tensors[name].isfinite().all():
                raise InputError(f"checkpoint holds values of {name} that are no finite numbers")
            own[name].copy_(tensors[name])

    # Image tower.

    @torch.no_grad()
    def frozen_image(self, images):
        """Frozen CLIP: images `[B, 3, S, S]` → the tokens that enter the first layer in which a head is open to an
        attribute token `[B, N, D_v]`, and f_cls0 `[B, E]`."""
        x, first = self.clip.visual.embed(images), len(self.image_blocks) - ADAPTED_LAYERS + self.closed
        for block in self.image_blocks[:first]:
            x = block(x)
        prefix = x
        for block in self.image_blocks[first:]:
            x = block(x, rows=CLS if block is self.image_blocks[-1] else slice(None))
        return prefix, normalize(self.clip.visual.head(x[:, 0]))

    def adapted_image(self, x):
        """Layers J..L with attribute tokens and role mask: frozen_image's `[B, N, D_v]` → f_cls `[B, E]`, f_attr
        `[B, A, E]`."""
        visual, r, N = self.clip.visual, self.attr_tokens, x.shape[1]
        tokens, last = r[None], ADAPTED_LAYERS - 1               # no positional embedding
        for l, (block, attend) in enumerate(zip(self.image_blocks[-ADAPTED_LAYERS:], self.image_attention)):
            if l > 0:
                tokens = self.beta * r + (1 - self.beta) * tokens                      # β-mixing of r with r̃
            if l < self.closed:                                  # the tokens meet each other alone, for all images alike
                tokens = block(tokens)
                continue
            qkv = None
            if l == self.closed:                                 # x is still frozen CLIP's: no gradient goes through it
                with torch.no_grad():
                    known = block.qkv(x, slice(None) if l < last else CLS)
                qkv = together(known, block.qkv(tokens))
            x = torch.cat([x, tokens.expand(len(x), -1, -1)], dim=1)
            x = block(x, attend, slice(None) if l < last else (slice(None), self.read), qkv)
            x, tokens = (x[:, :N], x[:, N:]) if l < last else (x[:, :1], x[:, 1:])
        f_attr = normalize(visual.ln_post(tokens) @ self.attr_proj)
        return normalize(visual.head(x[:, 0])), f_attr.expand(len(x), -1, -1)

    # Text tower.

    @torch.no_grad()
    def prompts(self, tokens):
        """Layers 1..J-1 of the class prompts, once per run: Tokens → Prompts."""
        chunks, shortest_first = [], tokens.eot.argsort(stable=True)
        for chosen in shortest_first.split(self.chunk):
            eot = tokens.eot[chosen]
            x = self.clip.text_embed(tokens.ids[chosen, :int(eot.max()) + 1])
            for block in self.text_blocks[:-ADAPTED_LAYERS]:
                x = block(x, causal)
            chunks.append((x, eot))
        return Prompts(chunks, shortest_first.argsort())

    def adapted_text(self, prompts):
        """Layers J..L with the text tokens after BOT: Prompts → f_text `[C, E]`."""
        r, blocks, ahead = self.text_tokens, self.text_blocks[-ADAPTED_LAYERS:], []
        bot, tokens = prompts.chunks[0][0][:1, :1], r[None]
        for l, block in enumerate(blocks):                       # causal: they see no class's words, once for all
            if l > 0:
                tokens = self.beta * r + (1 - self.beta) * tokens
            x, shapes = pack([bot, tokens], "b * d")
            ahead.append(block.qkv(x))
            bot, tokens = unpack(block(x, causal, qkv=ahead[-1]), shapes, "b * d")

        def words(x, eot):
            x, eot = x[:, 1:], eot - 1                           # after BOT
            T, M = x.shape[1], 1 + len(r)
            mask = torch.ones(T, M + T, dtype=torch.bool, device=x.device).tril(M)
            rows = slice(None)
            for block, (_, *before) in zip(blocks, ahead):
                if block is blocks[-1]:                          # only what is read
                    rows = torch.arange(len(x), device=x.device)[:, None], eot[:, None]
                    mask = rearrange(mask[eot], "c k -> c 1 1 k")
                q, *own = block.qkv(x, rows)
                attend = partial(F.scaled_dot_product_attention, attn_mask=mask)
                x = block(x, attend, rows, (q, *together(before, own)))
            return x[:, 0]
        x = torch.cat([words(*chunk) for chunk in prompts.chunks])[prompts.order]
        return normalize(self.clip.text_head(x))

    @torch.no_grad()
    def frozen_text(self, prompts):
        """Layers J..L of frozen CLIP: Prompts → f_text0 `[C, E]`."""
        found = []
        for x, eot in prompts.chunks:
            for block in self.text_blocks[-ADAPTED_LAYERS:]:
                x = block(x, causal)
            found.append(x[torch.arange(len(x), device=x.device), eot])
        return normalize(self.clip.text_head(torch.cat(found)[prompts.order]))


def normalize(x):
    return F.normalize(x.float(), dim=-1)                        # features and losses are float32 under autocast


# ------------------------------------------------------------------------------------------------- fusion and losses

def fuse(f_cls, f_attr, f_text, alpha, tau):
    """Fused logits `[B, C]` = α_cls · τ f_cls f_textᵀ + Σ_k α_k · τ f_attr,k f_textᵀ."""
    branches, _ = pack([f_cls, f_attr], "b * e")                 # [B, 1 + A, E]
    return tau * torch.einsum("a,bae,ce->bc", alpha, branches, f_text)


def ce_loss(logits, labels):
    """L_CE: cross-entropy of the fused logits."""
    return F.cross_entropy(logits, labels)


def reg_loss(f_cls, f_cls0, f_text, f_text0):
    """L_reg = mean(1 - cos(f_cls, f_cls⁰)) + mean(1 - cos(f_text, f_text⁰)); features come normalised."""
    return (1 - (f_cls * f_cls0).sum(dim=-1)).mean() + (1 - (f_text * f_text0).sum(dim=-1)).mean()


def fusion_loss(alpha):
    """L_fusion = -log α_cls: keeps weight on the class feature, which is the one that carries over to new classes."""
    return -alpha[0].log()


# ------------------------------------------------------------------------------------------------------- checkpoints

def save_checkpoint(path, model, **record):
    """Writes what was trained and what it takes to build the model around it again. record: whatever else to keep."""
    clip, roles = model.clip, model.roles
    write(path, dict(trained=model.trained(), alpha=model.alpha.tolist(), beta=model.beta, model=clip.name,
                     pretrained=clip.pretrained, quick_gelu=clip.quick_gelu, fingerprint=clip.fingerprint,
                     attributes=list(roles.attributes), visible=roles.visible, roles=roles.source, **record))


def write(path, state):
    """torch.save to a temporary name, then moved into place: an interrupted write loses nothing."""
    buffer = io.BytesIO()                                        # a full disk is an OSError here, a RuntimeError there
    torch.save(state, buffer)
    Path(f"{path}.tmp").write_bytes(buffer.getbuffer())
    os.replace(f"{path}.tmp", path)


def read_checkpoint(path, **kinds):
    """Everything in a checkpoint, as a dict on the CPU. kinds: the types of what `record` added. Errors: InputError."""
    kinds = {"trained": dict, "beta": float, "model": str, "pretrained": (str, type(None)), "quick_gelu": bool,
             "fingerprint": str, "attributes": list, "visible": torch.Tensor, "roles": str, **kinds}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"no checkpoint {path}: {error.strerror}") from None
    except Exception:                                            # unpickling raises whatever the bytes make it raise
        raise InputError(f"{path} is damaged, or no checkpoint of DeAR: move it away") from None
    if wrong:
        raise InputError(f"{path} is no checkpoint of DeAR (its {', '.join(wrong)}): move it away")
    return state


def load_checkpoint(path, clip=None, device="cpu", **kinds):
    """Builds the DeAR of a checkpoint, on the CLIP it was trained on. clip: that CLIP, if it is loaded already.

    kinds: as in `read_checkpoint`. Returns (DeAR, everything in the file). Errors: InputError, also where
    `clip` has other weights or activation.
    """
    state = read_checkpoint(path, **kinds)
    clip = clip or load_clip(state["model"], state["pretrained"], state["quick_gelu"], device)
    if clip.fingerprint != state["fingerprint"]:
        raise InputError(f"{path} was trained on other weights: {state['model']} {state['pretrained'] or ''} "
                         f"({state['fingerprint']}), not {clip.name} {clip.pretrained or ''} ({clip.fingerprint})")
    if clip.quick_gelu != state["quick_gelu"]:
        raise InputError(f"{path} was trained with {'QuickGELU' if state['quick_gelu'] else 'GELU'}; load CLIP so too")
    roles = Roles(tuple(state["attributes"]), state["visible"], state["roles"])
    model = DeAR(clip, roles, K=len(state["trained"].get("text_tokens", ())), beta=state["beta"])
    model.load_trained(state["trained"])
    return model, state
