"""Train the tiny pair: an MLA language model on Python code, and the DSpark drafter that goes with it.

Stages, each resumable from the folder given by --out (run some with --stage, comma-separated; the default is all):

  data     the standard library without its held-out modules -> tokenizer, train.bin, held.bin (int16 token ids)
  target   a dense DeepseekV3ForCausalLM with tied embeddings -> target/
  unloop   fine-tunes target/ so that it repeats itself less
  rollout  the target continues training prompts -> rollout.npz: the drafter must learn the target's text, not only ours
  draft    the k3_dspark drafter, against the frozen target as saved -> draft/
  check    training form (many blocks, one mask) against serving form (one block, paged context), and no look-ahead
  eval     accept_len of the engine's real loop on held-out prompts, against plain decoding -> eval.json

    python examples/tiny_pair/train.py --out pair          # one H200: about twelve minutes
    python examples/tiny_pair/train.py --out toy --toy     # a CPU: minutes; shows that everything runs, learns nothing
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from many_blocks import draft_blocks, latent_twin, roll_out, target_hidden
from safetensors.torch import save_file
from torch import nn

from trtllm_dspark.config import DraftConfig
from trtllm_dspark.context.draft_context import Segment
from trtllm_dspark.engine.engine import Engine
from trtllm_dspark.engine.loading import DraftOptions, load_drafter
from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.engine.target import HuggingFaceTarget
from trtllm_dspark.evaluation.stdlib_text import held_out_files, held_out_prompts, training_files
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.stats import distinct_ngrams

BOS, EOS, PAD, MASK = range(4)  # reserved ids; MASK is never in the text
VOCAB, CONTEXT, BLOCK = 2048, 1024, 7
TAPS = [0, 2, 4]
MLA = dict(
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=2 * CONTEXT,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
)
TARGET = MLA | dict(
    num_hidden_layers=6,
    intermediate_size=448,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    tie_word_embeddings=True,
    dtype="bfloat16",
    num_nextn_predict_layers=0,
    # all layers are dense, so that none of these is used; they only have to be consistent
    first_k_dense_replace=6,
    moe_intermediate_size=32,
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"), 1),
)
DRAFT = dict(architectures=["K3DSparkModel"], model_type="k3_dspark", **MLA) | dict(
    num_hidden_layers=2,
    intermediate_size=512,
    rms_norm_eps=1e-5,
    mla_use_nope=False,
    mla_use_output_gate=False,
    rope_theta=10000.0,
    rope_parameters=dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=512,
        rope_theta=10000.0,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    num_target_layers=len(TAPS),  # in this dialect: how many taps
    target_layer_ids=TAPS,
    target_hidden_size=MLA["hidden_size"],
    target_num_hidden_layers=TARGET["num_hidden_layers"],
    block_size=BLOCK,
    mask_token_id=MASK,
    markov_rank=32,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    tie_word_embeddings=False,
    draft_vocab_size=VOCAB,
    torch_dtype="bfloat16",
)
WARM_UP = 5  # steps before one is captured, in which libraries and kernels are loaded
Scalars = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------------------------- data
def make_data(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    train, held = training_files(args.stdlib), held_out_files(args.stdlib)
    texts = {"train": [path.read_text("utf-8") for path in train], "held": [path.read_text("utf-8") for path in held]}
    if args.toy:
        texts["train"] = texts["train"][::20]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts["train"], trainer)
    args.out.mkdir(parents=True, exist_ok=True)
    for split, files in texts.items():
        random.Random(0).shuffle(files)
        ids = [np.array([*encoding.ids, EOS], np.int16) for encoding in tokenizer.encode_batch(files)]
        np.concatenate(ids).tofile(args.out / f"{split}.bin")
        characters, tokens = sum(map(len, files)), sum(map(len, ids))
        print(f"{split}: {len(files)} files, {characters:,} characters, {tokens:,} tokens", flush=True)
    special = dict(bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", mask_token="<|mask|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TARGET["max_position_embeddings"], **special)
    fast.save_pretrained(args.out / "target")


def load_tokens(path: Path, device: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.int16)).to(device)


def windows(tokens: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Random windows of a token stream, [count, length]. Files run into one another, separated by EOS."""
    start = torch.randint(len(tokens) - length, (count, 1), device=tokens.device)
    return tokens[start + torch.arange(length, device=tokens.device)].long()


# --------------------------------------------------------------------------------------------------------------- training
def autocast(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def is_norm(name: str) -> bool:
    return "norm" in name


def optimise(
    parameters: Iterable[tuple[str, nn.Parameter]],
    loss_of: Callable[[], tuple[torch.Tensor, Scalars]],
    report: Callable[[int, float, dict[str, float]], None],
    *,
    steps: int,
    seconds: float,
    lr: float,
    graph: bool,
) -> None:
    """AdamW, 100 steps of warm-up, cosine to zero over `steps`, or over `seconds` where that ends first (0: no limit).

    With `graph` one whole step, sampling included, is captured in a CUDA graph: models of this size are otherwise bound
    by launches. `report` is called twenty times.
    """
    named = [(name, p) for name, p in parameters if p.requires_grad]
    decayed = [p for name, p in named if p.ndim > 1 and not is_norm(name)]
    others = [p for name, p in named if p.ndim < 2 or is_norm(name)]
    cuda = named[0][1].is_cuda
    rate = torch.tensor(lr, device=named[0][1].device)
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=cuda, capturable=cuda, foreach=False)
    progress, started = 0.0, time.time()

    def set_rate(step: int) -> None:
        rate.fill_(lr * min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * progress))))

    def train_step() -> Scalars:
        loss, scalars = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        optimizer.step()
        return {name: value.detach() for name, value in scalars.items()}

    step, scalars, shown = 0, {}, 0.0
    captured: torch.cuda.CUDAGraph | None = None
    while progress < 1:
        set_rate(step)
        if step == WARM_UP:
            started = time.time()
        if graph and step == WARM_UP:
            torch.cuda.synchronize()
            optimizer.zero_grad(set_to_none=True)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                scalars = train_step()
        if captured is not None:
            captured.replay()
        else:  # the first steps before a capture must run on a stream of their own
            stream = torch.cuda.Stream() if graph else None
            with torch.cuda.stream(stream):  # type: ignore[arg-type]
                optimizer.zero_grad(set_to_none=True)
                scalars = train_step()
            if stream is not None:
                torch.cuda.synchronize()
        step += 1
        if cuda and step % 20 == 0:
            torch.cuda.synchronize()  # else the clock runs ahead of the work
        elapsed = time.time() - started if step > WARM_UP else 0.0
        progress = max(step / steps, elapsed / seconds if seconds else 0.0)
        if progress >= min(1.0, shown):
            shown += 0.05
            report(step, elapsed, {name: float(value) for name, value in scalars.items()})


def print_report(step: int, elapsed: float, scalars: dict[str, float]) -> None:
    figures = "  ".join(f"{name} {value:.3f}" for name, value in scalars.items())
    print(f"{step:6d} {elapsed:6.1f} s  {figures}", flush=True)


# ----------------------------------------------------------------------------------------------------------------- target
def train_target(args: argparse.Namespace) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**TARGET)
    config.pad_token_id = None  # else the embedding zeroes that row's gradient, which a tied output row needs
    torch.manual_seed(args.seed)
    lm = DeepseekV3ForCausalLM(config).float().to(args.device)
    print(f"target: {sum(p.numel() for p in lm.parameters()):,} parameters", flush=True)
    train, held = load_tokens(args.out / "train.bin", args.device), load_tokens(args.out / "held.bin", args.device)
    probe = windows(held, 64, args.context)

    def next_token_loss(ids: torch.Tensor) -> torch.Tensor:
        with autocast(args.device):
            logits = lm.lm_head(target_hidden(lm, ids, [])[1])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def loss_of() -> tuple[torch.Tensor, Scalars]:
        loss = next_token_loss(windows(train, args.target_batch, args.context))
        return loss, dict(loss=loss)

    def report(step: int, elapsed: float, scalars: dict[str, float]) -> None:
        with torch.no_grad():
            print_report(step, elapsed, scalars | dict(held=float(next_token_loss(probe))))

    limits = dict(steps=args.target_steps, seconds=args.target_seconds, lr=args.target_lr, graph=args.graph)
    optimise(lm.named_parameters(), loss_of, report, **limits)
    save_target(lm, args.out / "target")


def with_loops(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make each window repeat one short span to its end -> ids, whether a token repeats an earlier one, and which.

    Args:
        ids: [B, T].
    Returns:
        ids [B, T]; repeats [B, T]; source [B, T], the position one period earlier (0 where nothing repeats).
    """
    batch, length = ids.shape
    at = torch.arange(length, device=ids.device)
    first = torch.randint(length // 16, length // 2, (batch, 1), device=ids.device)
    period = torch.randint(2, length // 16, (batch, 1), device=ids.device)
    ids = ids.gather(1, torch.where(at < first, at, first + (at - first) % period))
    repeats = at >= first + period
    return ids, repeats, torch.where(repeats, at - period, 0)


def unloop(args: argparse.Namespace) -> None:
    """Fine-tune the target so that it repeats itself less, with language modelling beside it.

    A token that closes a repetition shall be `--unloop-ratio` times as probable as it was one period earlier (arXiv
    2206.02369); small models otherwise grow surer with each turn of a loop and never leave it.
    """
    lm = load_target(args.out / "target", args.device).float().requires_grad_(True)
    lm.config.pad_token_id = None
    torch.manual_seed(args.seed + 3)
    train, held = load_tokens(args.out / "train.bin", args.device), load_tokens(args.out / "held.bin", args.device)
    probe, looping = windows(held, 16, args.context), args.target_batch // 8

    def log_probabilities(ids: torch.Tensor) -> torch.Tensor:
        """Of each token but the first, [B, T - 1]."""
        with autocast(args.device):
            logits = lm.lm_head(target_hidden(lm, ids, [])[1])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return -loss.view(len(ids), -1)

    def loss_of() -> tuple[torch.Tensor, Scalars]:
        text = windows(train, args.target_batch, args.context)
        loops, repeats, source = with_loops(text[:looping])
        log_p = log_probabilities(torch.cat((text[looping:], loops)))
        loss, p = -log_p[:-looping].mean(), F.pad(log_p[-looping:].exp(), (1, 0))  # p[:, t]: of the token at t
        wanted = args.unloop_ratio * p.gather(1, source).detach()
        too_far = -torch.log1p(-(p - wanted).abs().clamp(max=1 - 1e-6))
        excess = (too_far * repeats).sum() / repeats.sum()
        return loss + excess, dict(loss=loss, excess=excess)

    def report(step: int, elapsed: float, scalars: dict[str, float]) -> None:
        with torch.no_grad():
            print_report(step, elapsed, scalars | dict(held=float(-log_probabilities(probe).mean())))

    limits = dict(steps=args.unloop_steps, seconds=0.0, lr=args.unloop_lr, graph=args.graph)
    optimise(lm.named_parameters(), loss_of, report, **limits)
    save_target(lm, args.out / "target")


def save_target(lm: Any, folder: Path) -> None:
    lm.config.pad_token_id = lm.generation_config.pad_token_id = PAD
    lm.generation_config.bos_token_id, lm.generation_config.eos_token_id = BOS, EOS
    lm.to(torch.bfloat16).save_pretrained(folder)


def load_target(folder: Path, device: str) -> Any:
    """The target as saved: in bf16 on a GPU, the same values in fp32 on a CPU."""
    from transformers import DeepseekV3ForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)


def make_rollouts(args: argparse.Namespace) -> None:
    lm, train = load_target(args.out / "target", args.device), load_tokens(args.out / "train.bin", args.device)
    twin = latent_twin(lm)
    torch.manual_seed(args.seed + 1)
    ids, lengths = [], []
    for length in args.rollout_prompts:
        prompts = windows(train, args.rollout_batch, length)
        # a quarter greedy, the others at a temperature of up to 1: text that no training prompt leads to
        temperature = (torch.rand(len(prompts), 1, device=args.device) * 4 / 3 - 1 / 3).clamp(min=0.0)
        rolled = roll_out(twin, lm.lm_head.weight, prompts, args.context - length, temperature)
        ids.append(rolled.to(torch.int16).cpu().numpy())
        lengths.append(np.full(len(prompts), length, np.int16))
        print(f"rollout: {len(prompts)} prompts of {length} tokens", flush=True)
    np.savez(args.out / "rollout.npz", ids=np.concatenate(ids), lengths=np.concatenate(lengths))


# ------------------------------------------------------------------------------------------------------------------ draft
def new_drafter(lm: Any, device: str) -> MLADSparkForCausalLM:
    """A drafter ready to train: the target's embedding, frozen, and its final norm; noise elsewhere; no Markov bias yet."""
    model = MLADSparkForCausalLM.empty(DraftConfig.from_dict(DRAFT), device=device, attention_backend="VANILLA")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_norm(name):
                parameter.fill_(1.0)
            elif parameter.ndim < 2:
                parameter.zero_()
            else:
                parameter.normal_(std=0.02)
        model.markov_head.markov_w1.weight.normal_(std=0.5)
        model.markov_head.markov_w2.weight.zero_()
        model.embed_tokens.weight.copy_(lm.model.embed_tokens.weight)
        model.final_norm.weight.copy_(lm.model.norm.weight)
    model.embed_tokens.requires_grad_(False)
    bad = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    assert not bad, f"never initialised: {bad}"
    return model


def old_drafter(folder: Path, lm: Any, device: str) -> MLADSparkForCausalLM:
    """A drafter to train on: of this target, or of one that this target was fine-tuned from."""
    model = MLADSparkForCausalLM.from_pretrained(folder, device=device, dtype=torch.float32, attention_backend="VANILLA")
    model.embed_tokens.weight.copy_(lm.model.embed_tokens.weight)
    model.train().requires_grad_(True).embed_tokens.requires_grad_(False)
    return model


def draft_loss(
    logits: torch.Tensor, confidence: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, Scalars]:
    """0.1 CE + 0.9 L1 + BCE, each averaged over rows with weights exp(-k / 4).

    Args:
        logits, teacher: [B, A, S, V], fp32: the drafter's and the target's. confidence: [B, A, S], logits.
        labels: [B, A, S], the tokens that follow.
    """
    weight = torch.exp(-torch.arange(logits.shape[2], device=logits.device) / 4.0)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sum() / (weight.sum() * x[..., 0].numel())

    log_p = logits.log_softmax(-1)
    ce = -log_p.gather(-1, labels[..., None])[..., 0]
    l1 = (log_p.exp() - teacher.softmax(-1)).abs().sum(-1)
    accepted = 1 - l1.detach() / 2  # the probability that a sampled draft is accepted
    bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    tau = 1 + accepted.cumprod(-1).sum(-1).mean()
    return mean(0.1 * ce + 0.9 * l1 + bce), dict(ce=mean(ce), l1=mean(l1), bce=mean(bce), tau_sampled=tau)


def train_draft(args: argparse.Namespace) -> None:
    lm = load_target(args.out / "target", args.device)
    lm_head = lm.lm_head.weight
    torch.manual_seed(args.seed + 2)
    model = new_drafter(lm, args.device) if args.draft_from is None else old_drafter(args.draft_from, lm, args.device)
    print(f"draft: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train, held = load_tokens(args.out / "train.bin", args.device), load_tokens(args.out / "held.bin", args.device)
    stored = np.load(args.out / "rollout.npz")
    rollouts = torch.from_numpy(stored["ids"]).to(args.device)
    prompt_lengths = torch.from_numpy(stored["lengths"]).to(args.device).long()
    own = int(args.draft_batch * args.rollout_share)
    last_anchor = args.context - BLOCK - 1

    def loss_of() -> tuple[torch.Tensor, Scalars]:
        pick = torch.randint(len(rollouts), (own,), device=args.device)
        ids = torch.cat((windows(train, args.draft_batch - own, args.context), rollouts[pick].long()))
        # text: anywhere. rollouts: in the target's own text, denser near the prompt's end, where it is least repetitive
        first = torch.cat((torch.zeros_like(ids[own:, 0]), prompt_lengths[pick] - 1))[:, None]
        where = torch.rand(len(ids), args.anchors, device=args.device)
        where = torch.where(first > 0, where.square(), where)
        anchors = first + (where * (last_anchor + 1 - first)).long().clamp(max=last_anchor)
        rows = (anchors[..., None] + torch.arange(BLOCK, device=args.device)).flatten(1)
        with torch.no_grad():
            taps, hidden = target_hidden(lm, ids, TAPS)
            teacher = F.linear(hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1])), lm_head).float()
        with autocast(args.device):
            logits, confidence = draft_blocks(model, lm_head, taps, ids, anchors)
        return draft_loss(logits, confidence, teacher.view_as(logits), ids.gather(1, rows + 1).view_as(confidence))

    probe, first = held_rollouts(lm, held, args)

    def report(step: int, elapsed: float, scalars: dict[str, float]) -> None:
        print_report(step, elapsed, scalars | held_acceptance(model, lm, probe, first))
        save_draft(model, args.out / "draft")

    limits = dict(steps=args.draft_steps, seconds=args.draft_seconds, lr=args.draft_lr, graph=args.graph)
    optimise(model.named_parameters(), loss_of, report, **limits)


def held_rollouts(lm: Any, held: torch.Tensor, args: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """Greedy continuations of held-out windows, and the position of their first anchor: a quick look while training."""
    length = args.context // 8
    prompts = windows(held, 64, length)
    return roll_out(latent_twin(lm), lm.lm_head.weight, prompts, length + BLOCK), length


@torch.no_grad()
def held_acceptance(model: MLADSparkForCausalLM, lm: Any, ids: torch.Tensor, first: int) -> dict[str, float]:
    """Mean accept_len over every anchor of greedy continuations, and over their first 16."""
    device = ids.device.type
    anchors = torch.arange(first, ids.shape[1] - BLOCK, device=ids.device).expand(len(ids), -1)
    taps, _ = target_hidden(lm, ids, TAPS)
    hit = []
    for part in torch.arange(len(ids)).split(16):
        with autocast(device):
            logits, _ = draft_blocks(model, lm.lm_head.weight, taps[part], ids[part], anchors[part])
        rows = anchors[part, :, None] + 1 + torch.arange(BLOCK, device=ids.device)
        hit.append(logits.argmax(-1) == ids[part].gather(1, rows.flatten(1)).view(logits.shape[:3]))
    accept_len = 1 + torch.cat(hit).float().cumprod(-1).sum(-1)
    return dict(held_al=float(accept_len.mean()), held_al16=float(accept_len[:, :16].mean()))


def save_draft(model: MLADSparkForCausalLM, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {name: value.to(torch.bfloat16) for name, value in model.checkpoint_tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DRAFT, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------------- check and eval
@torch.no_grad()
def check(args: argparse.Namespace) -> None:
    """On the CPU in fp32: training form equals serving form, and features at or after the anchor have no influence."""
    target = HuggingFaceTarget.from_pretrained(args.out / "target", dtype=torch.float32)
    drafter = load_drafter(args.out / "draft", target, DraftOptions(pool_tokens=4096)).drafter
    model, lm_head = drafter.model, target.model.lm_head.weight
    ids = windows(load_tokens(args.out / "held.bin", "cpu"), 2, 96)
    anchors = torch.tensor([[0, 1, 20, 80], [5, 33, 88, 40]])
    taps, _ = target_hidden(target.model, ids, TAPS)
    logits, confidence = draft_blocks(model, lm_head, taps, ids, anchors)
    worst = 0.0
    for b, a in np.ndindex(*anchors.shape):
        p = int(anchors[b, a])
        drafter.context.admit((b, a), 128)
        drafter.extend([Segment((b, a), 0, p)], taps[b, :p])
        hidden = drafter.propose([(b, a)], ids[b, p : p + 1], BLOCK).hidden[0]
        previous = ids[b, p : p + BLOCK]
        served = F.linear(hidden, lm_head) + model.markov_head(previous)
        surer = model.confidence_head(hidden, model.markov_head.code(previous))
        worst = max(worst, float((served - logits[b, a]).abs().max()), float((surer - confidence[b, a]).abs().max()))
    for a in range(anchors.shape[1]):
        noisy = torch.stack([torch.where(torch.arange(96)[:, None] < anchors[b, a], taps[b], 1e3) for b in range(2)])
        again, _ = draft_blocks(model, lm_head, noisy, ids, anchors)
        assert torch.equal(again[:, a], logits[:, a]), f"features at or after anchor {a} have an influence"
    print(f"training form against serving form: {worst:.1e} apart on logits of {float(logits.abs().max()):.0f}")
    assert worst < 1e-4, worst


def evaluate(args: argparse.Namespace) -> None:
    """The real loop on the CPU in fp32, where one row and eight give the same token except at exact ties."""
    target = HuggingFaceTarget.from_pretrained(args.out / "target", dtype=torch.float32)
    drafter = load_drafter(args.out / "draft", target, DraftOptions()).drafter
    prompts = held_out_prompts(target.tokenizer, args.eval_prompts, args.eval_length, stdlib=args.stdlib)
    params = SamplingParams(max_new_tokens=args.eval_length)
    drafted = Engine(target, drafter, num_drafts=BLOCK).generate(prompts, params)
    plain = Engine(target).generate(prompts, params)
    # a verification near the end submits fewer drafts than K; it would pull every figure down
    passes = [[c for c in completion.commits if c.submitted == BLOCK] for completion in drafted]
    accepted = [commit.accepted for commits in passes for commit in commits]
    first16 = [commit.accepted for commits in passes for commit in commits if commit.offset < 16]
    by_prompt = [1 + statistics.mean(c.accepted for c in commits) for commits in passes if commits]
    result = dict(
        prompts=len(prompts),
        verifications=len(accepted),
        accept_len=1 + statistics.mean(accepted),
        accept_len_by_prompt=[round(x, 2) for x in sorted(by_prompt)],
        standard_error=statistics.stdev(by_prompt) / len(by_prompt) ** 0.5,
        first16_verifications=len(first16),
        accept_len_first16=1 + statistics.mean(first16),
        first16_standard_error=statistics.stdev(first16) / len(first16) ** 0.5,
        survival=[statistics.mean(a > k for a in accepted) for k in range(BLOCK)],
        survival_first16=[statistics.mean(a > k for a in first16) for k in range(BLOCK)],
        distinct_4grams=statistics.mean(distinct_ngrams(completion.tokens) for completion in plain),
        stopped_early=sum(completion.finish != "length" for completion in plain),
        differ_from_plain=sum(a.tokens != b.tokens for a, b in zip(drafted, plain, strict=True)),
    )
    (args.out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="working folder; target/ and draft/ in it are the pair")
    parser.add_argument("--stage", default="data,target,unloop,rollout,draft,check,eval")
    parser.add_argument("--stdlib", type=Path, help="a standard library to read; default: this Python's")
    parser.add_argument("--toy", action="store_true", help="minutes on a CPU")
    parser.add_argument("--draft-from", type=Path, help="a draft to train on; default: start from noise")
    parser.add_argument("--no-graph", action="store_true", help="do not capture training steps in CUDA graphs")
    defaults = dict(
        seed=0,
        context=CONTEXT,
        target_steps=1600,
        target_seconds=0.0,  # a limit on the time after warm-up; 0: none
        target_batch=64,
        target_lr=3e-3,
        unloop_steps=100,
        unloop_lr=4e-4,
        unloop_ratio=0.85,
        rollout_prompts="128,384,640,768,832,896,896,960",
        rollout_batch=8192,
        rollout_share=0.5,
        draft_steps=24000,
        draft_seconds=0.0,
        draft_batch=16,
        draft_lr=2e-3,
        anchors=128,
        eval_prompts=40,
        eval_length=128,
    )
    toy = dict(context=128, target_steps=40, target_batch=8, unloop_steps=5, rollout_prompts="32,96", rollout_batch=8)
    toy |= dict(draft_steps=40, draft_batch=4, anchors=16, eval_prompts=4, eval_length=32)
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    args = parser.parse_args()
    if args.toy:
        vars(args).update(toy)
    args.rollout_prompts = [int(length) for length in args.rollout_prompts.split(",")]
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.graph = args.device == "cuda" and not args.no_graph
    stages = dict(
        data=make_data, unloop=unloop, target=train_target, rollout=make_rollouts, draft=train_draft, check=check, eval=evaluate
    )
    for stage in args.stage.split(","):
        start = time.time()
        stages[stage](args)
        print(f"== {stage}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
