"""The cases of the bench: their floors, bytes and FLOP by hand, the suite, and the inputs that they draw."""

import pytest
import torch
from bench_fabricated import APPEND, ATTENTION, BY_HEAD, CPU, GATED, H200, L2, RAGGED
from published import INFERACT

from cute_kernels.bench import report, timing
from cute_kernels.bench.cases import (
    BlockAttentionCase,
    Case,
    ContextAppendCase,
    FewRowLinearCase,
    MarkovChainCase,
    QueryRopeCase,
)
from cute_kernels.bench.contestants import CONTESTANTS
from cute_kernels.bench.suites import BEST_PEER, SUITES, products, select
from cute_kernels.few_row_linear.config import MAX_ROWS, SILU_MUL, Product


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (BlockAttentionCase(1, 1024), "1.5"),
        (BlockAttentionCase(1, 8192), "11.6"),
        (BlockAttentionCase(8, 8192), "92.5"),
        (BlockAttentionCase(64, 1024), "93"),
        (BlockAttentionCase(64, 8192), "740"),
        (BlockAttentionCase(1, 1024, heads=8), "0.3"),
        (BlockAttentionCase(1, 8192, heads=8), "2.2"),
        (BlockAttentionCase(64, 8192, heads=8), "143"),
        (BlockAttentionCase(64, 8192, heads=64, rows=1), "143"),
        (ContextAppendCase(8), "0.02"),
        (ContextAppendCase(512), "1.4"),
        (ContextAppendCase(1024), "2.7"),
        (QueryRopeCase(1), "0.03"),
        (MarkovChainCase(1), "137"),
        (MarkovChainCase(64), "171"),
        (FewRowLinearCase("q_b", 12288, 1536), "8.8"),
        (FewRowLinearCase("absorb", 512, 128, groups=64, transposed=True), "2.1"),
        (FewRowLinearCase("gate_up", 14336, 7168, form=SILU_MUL), "95.7"),
        (FewRowLinearCase("head", 163840, 7168), "547"),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_floors_are_those_computed_by_hand(case: Case, floor: str) -> None:
    found = report.floor_us(case.flop, case.bytes, H200.copy, H200.matmul)
    decimals = len(floor.partition(".")[2])
    assert f"{found:.{decimals}f}" == floor


def test_bytes_and_flop_by_hand() -> None:
    attention = BlockAttentionCase(3, 1024)
    assert attention.flop == 2176 * 3 * 512 * 1032
    assert attention.bytes == 3 * (1152 * 1032 + 1152 * 512 + 1024 * 512)
    ragged = BlockAttentionCase(3, 4096, shortest=100)
    assert len(ragged.lengths) == len(set(ragged.lengths)) == 3
    assert ragged.flop == 2176 * 512 * (sum(ragged.lengths) + 24)
    assert ragged.bytes == 1152 * (sum(ragged.lengths) + 24) + 3 * 512 * (1152 + 1024)
    assert (ContextAppendCase(7).flop, ContextAppendCase(7).bytes) == (0, 7 * 5 * 2304)
    assert (QueryRopeCase(2).flop, QueryRopeCase(2).bytes) == (0, 16 * (4 * 64 * 64 + 4 * 64))
    assert MarkovChainCase(8).flop == 2 * 8 * 7 * 163_840 * 256
    assert MarkovChainCase(8).bytes == 7 * 163_840 * (256 + 8) * 2
    by_head = FewRowLinearCase("absorb", 512, 128, rows=3, groups=64, transposed=True)
    assert by_head.flop == 2 * 3 * 64 * 512 * 128
    assert by_head.bytes == 2 * (64 * 512 * 128 + 3 * 64 * (512 + 128))
    gated = FewRowLinearCase("gate_up", 14336, 7168, rows=3, form=SILU_MUL)
    assert (gated.flop, gated.bytes) == (2 * 2 * 3 * 14336 * 7168, 2 * (2 * 14336 * 7168 + 3 * (14336 + 7168)))


def test_the_suite_holds_the_shapes_it_promises() -> None:
    cases = select("kernels")
    attention = [case for case in cases if isinstance(case, BlockAttentionCase)]
    assert {(c.batch, c.context) for c in attention if c.heads == 64} == {
        (1, 1024),
        (1, 8192),
        (8, 8192),
        (64, 1024),
        (64, 8192),
    }
    assert {(c.batch, c.context) for c in attention if c.heads == 8} == {(1, 8192), (64, 8192)}
    for suite in SUITES:
        cases = select(suite)
        assert all(case.kernel in CONTESTANTS for case in cases)
        assert len({f"{case.kernel} {case.label}" for case in cases}) == len(cases)
    assert [case.label for case in select("kernels", "rope rows=512")] == ["rows=512 H=64"]
    assert select("hopper", "gate_up rows=8")[0].label == "gate_up rows=8 N=14336 K=7168 silu_mul"
    assert select("hopper", "unabsorb rows=16")[0].label == "unabsorb rows=16 G=64 N=128 K=512"
    assert select("hopper", " absorb rows=8")[0].label == "absorb rows=8 G=64 N=512 K=128 transposed"


def test_the_hopper_suite_asks_what_it_promises_and_holds_all_it_asks() -> None:
    suite = SUITES["hopper"]
    cases = {case.label for case in suite.cases if isinstance(case, BlockAttentionCase)}
    asked = {target.case.label: target.at_least for target in suite.targets if target.beside == BEST_PEER}
    assert asked["B=8 context=65536 H=64 S=8"] == 1.0 and asked["B=1 context=1024 H=64 S=8"] == 1.6
    assert asked["B=64 context=8192 H=64 S=1"] == asked["B=64 context=8192 H=4 S=8"] == 1.03
    assert asked["B=64 context=256..65536 H=64 S=8"] == 1.1
    assert len([label for label in asked if label.startswith("B=") and "V=" not in label]) == 17
    for target in suite.targets:
        assert target.case in suite.cases and (isinstance(target.beside, str) or target.beside in suite.cases)
    assert {f"B={batch} context={1024 << step} H=64 S=8" for batch in (1, 8) for step in range(8)} <= cases
    assert {f"B=64 context=8192 H={heads} S=8" for heads in (4, 8, 12, 16)} <= cases
    assert {f"B=64 context=8192 H=64 S=8 P={page_size}" for page_size in (32, 128)} <= cases
    entered = {(kernel, contestant.name) for kernel, group in CONTESTANTS.items() for contestant in group}
    assert suite.left_out < entered and not any(name.startswith("flashmla") or name == "ours" for _, name in suite.left_out)


def test_the_linear_layers_are_those_of_the_published_draft() -> None:
    """Fails when a shape is not the draft's, when the kernel does not take it, or when a suite lacks what it promises."""
    draft = INFERACT
    hidden, inside, heads, latent = (
        draft[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rotary, value = (draft[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    expected = {
        "q_a": Product(draft["q_lora_rank"], hidden),
        "kv_a": Product(latent + rotary, hidden),
        "q_b": Product(heads * (nope + rotary), draft["q_lora_rank"]),
        "absorb": Product(latent, nope, heads, transposed=True),
        "unabsorb": Product(value, latent, heads),
        "o": Product(hidden, heads * value),
        "gate_up": Product(inside, hidden, form=SILU_MUL),
        "down": Product(hidden, inside),
        "context_proj": Product(hidden, len(draft["target_layer_ids"]) * draft["target_hidden_size"]),
        "context_latents": Product(draft["num_hidden_layers"] * (latent + rotary), hidden),
        "head": Product(draft["vocab_size"], hidden),
    }
    found = {case.name: Product(case.outputs, case.inner, case.groups, case.form, case.transposed) for case in products(8)}
    assert found == expected and all(product.reason() is None for product in found.values())
    held = {
        suite: [(case.name, case.rows) for case in SUITES[suite].cases if isinstance(case, FewRowLinearCase)]
        for suite in SUITES
    }
    assert held["kernels"] == []  # it is for every GPU
    assert held["hopper"] == [(name, rows) for rows in (8, MAX_ROWS) for name in expected]


def test_weights_are_cold_and_the_largest_are_there_but_twice() -> None:
    """Fails when a graph's calls find weights in L2, or when the head, 2.35 GB, has more sets than the least."""
    for case in products(8):
        count, weights = timing.num_sets(case.bytes, L2), case.bytes - 2 * 8 * case.groups * (case.inner + case.outputs)
        assert count * weights >= 1.8 * L2  # sets hold rows and results too
        assert count == timing.MIN_SETS or count * case.bytes < 3 * L2, case.label


def test_a_linear_layers_weights_lie_as_a_checkpoint_has_them_and_keep_a_products_size() -> None:
    first, second = BY_HEAD.sets(2, CPU)
    assert first["x"].shape == (3, 4, 128) and first["weight"].shape == (4, 192, 128)
    assert first["weight"].stride() == (192 * 128, 1, 192)
    assert not torch.equal(first["weight"], second["weight"])
    gated = GATED.sets(1, CPU)[0]
    assert list(gated) == ["x", "gate", "up"] and gated["up"].is_contiguous() and not torch.equal(gated["gate"], gated["up"])
    for weight in (gated["gate"], gated["up"]):
        assert 0.8 < float((gated["x"].float() @ weight.float().T).std()) < 1.25


def test_ragged_lengths_are_log_uniform_and_the_same_in_every_run() -> None:
    """Fails when lengths are drawn uniformly: the median would lie near 33,000, and hardly one below 1,024."""
    case = BlockAttentionCase(1000, 65536, shortest=256)
    assert case.lengths == BlockAttentionCase(1000, 65536, shortest=256).lengths
    assert 256 <= min(case.lengths) and max(case.lengths) <= 65536
    for below, share in ((1024, 0.25), (4096, 0.5), (16384, 0.75)):
        assert sum(length < below for length in case.lengths) / 1000 == pytest.approx(share, abs=0.05)
    assert BlockAttentionCase(3, 70).lengths == (70, 70, 70)


def test_a_ragged_set_holds_its_lengths_and_nothing_else() -> None:
    (inputs,) = RAGGED.sets(1, CPU)
    assert tuple(inputs["context_len"].tolist()) == RAGGED.lengths and len(set(RAGGED.lengths)) > 1
    table, written = inputs["page_table"].long(), ~inputs["pages"].isnan().any(-1)
    assert int(written.sum()) == sum(RAGGED.lengths)
    for row, length, live in zip(table, RAGGED.lengths, RAGGED.pages_of_requests, strict=True):
        flat = written[row].flatten()
        assert flat[:length].all() and not flat[length:].any()
        assert (live - 1) * 16 < length + RAGGED.rows <= live * 16
    pages = [page for row, live in zip(table.tolist(), RAGGED.pages_of_requests, strict=True) for page in row[:live]]
    assert len(set(pages)) == len(pages)
    assert not set(table.flatten().tolist()) - set(range(len(inputs["pages"])))


def test_sets_differ_and_share_what_a_step_shares() -> None:
    first, second = ATTENTION.sets(2, CPU)
    assert first["page_table"] is second["page_table"] and first["context_len"] is second["context_len"]
    assert not torch.equal(first["q"], second["q"])
    again = ATTENTION.sets(1, CPU)[0]
    assert all(torch.equal(first[name].nan_to_num(-9.0), again[name].nan_to_num(-9.0)) for name in first)
    live = torch.zeros(first["pages"].shape[:2], dtype=torch.bool)
    for row in first["page_table"].tolist():
        for position in range(ATTENTION.context):
            assert not live[row[position // 16], position % 16]  # nobody shares
            live[row[position // 16], position % 16] = True
    assert torch.equal(~first["pages"].isnan().any(-1), live) and torch.equal(first["pages"].isnan().all(-1), ~live)
    slots = APPEND.sets(1, CPU)[0]["slots"]
    assert len(slots.unique()) == APPEND.tokens


def test_sums_of_the_chain_are_exact_in_bf16() -> None:
    """Otherwise tokens could not be compared exactly: fails when the integers are drawn too large."""
    inputs = MarkovChainCase(8, vocabulary=20_000, steps=1).sets(1, CPU)[0]
    bias = inputs["w1"][inputs["anchors"]].float() @ inputs["w2"].float().T
    for exact in (bias, bias + inputs["base_logits"][:, 0]):
        assert torch.equal(exact.bfloat16().float(), exact)
