"""The stand-in host at work: a target of Hugging Face inside its wrapper, a loop over requests, both KV managers.

It plays `PyExecutor`: schedules prompts in chunks beside decoding requests, grants draft pages, builds the step's metadata,
runs the wrapper, commits, and takes back what was rejected. Requests are those of the embedded engine, so that what the two
commit can be compared.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from trtllm_dspark.engine.requests import Completion, Request, SamplingParams
from trtllm_dspark.engine.target import HuggingFaceTarget

FLAVOURS = ("v2 fills -1", "v2 fills 0", "v1 fills 0")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"tensorrt_llm.{name}")


class Target(torch.nn.Module):
    """The target inside the wrapper: one pass over the rows of all requests, its own cache for each."""

    def __init__(self, hf: HuggingFaceTarget) -> None:
        super().__init__()
        self.hf = [hf]  # in a list: not a submodule
        self.caches: dict[int, Any] = {}
        self.embed_tokens = hf.model.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attn: Any, spec: Any) -> torch.Tensor:
        hf, rows, begin = self.hf[0], [], 0
        for index, length in enumerate(attn._seq_lens.tolist()):
            request = attn.request_ids[index]
            cache = self.caches.setdefault(request, hf.new_cache())
            wanted = 1 if index < attn.num_contexts else length
            out = hf.forward(input_ids[begin : begin + length], cache, wanted, with_taps=True)
            spec.captured_hidden_states[begin : begin + length] = out.taps
            padding = out.logits.new_full((length - wanted, out.logits.shape[-1]), torch.nan)
            rows.append(torch.cat((padding, out.logits)))
            begin += length
        return torch.cat(rows)


class StandIn:
    """A model built by the stand-in host, and its executor.

    Args:
        hf: the target. draft: the draft's folder. num_drafts: K. flavour: of FLAVOURS. page: tokens a page. blocks: of the
            pool. chunk: prompt tokens of a step and request. max_batch: of a step. extra: more of speculative_config.
        mapping: of Mapping. quant: the target's kv_cache_quant_algo.
    """

    def __init__(
        self,
        hf: HuggingFaceTarget,
        draft: Path,
        *,
        num_drafts: int = 7,
        flavour: str = FLAVOURS[0],
        page: int = 16,
        blocks: int = 64,
        chunk: int | None = None,
        max_batch: int = 8,
        max_seq_len: int = 512,
        extra: dict[str, Any] | None = None,
        mapping: dict[str, Any] | None = None,
        quant: str | None = None,
    ) -> None:
        config_module, arguments = module("_torch.model_config"), module("llmapi.llm_args")
        self.K, self.chunk, self.max_batch, self.max_seq_len = num_drafts, chunk, max_batch, max_seq_len
        self.spec_config = arguments.DSparkDecodingConfig(
            max_draft_len=num_drafts, speculative_model=str(draft), **(extra or {})
        )
        pretrained = hf.model.config
        pretrained.torch_dtype = torch.float32
        self.model_config = config_module.ModelConfig(
            pretrained,
            module("mapping").Mapping(**(mapping or {})),
            self.spec_config,
            config_module.QuantConfig(quant),
        )
        hf.set_taps(())
        self.target = Target(hf)
        wrapper = module("_torch.models.modeling_speculative").SpecDecOneEngineForCausalLM
        self.model = wrapper(self.target, self.model_config, hf.model.get_output_embeddings())
        self.hf = hf
        self.draft = draft
        self.requests: list[Request] = []
        self.done: dict[int, Completion] = {}
        self.absent: set[int] = set()
        self.events: list[str] = []
        self.before_step: Callable[[], None] = lambda: None
        self.steps = 0
        self.make_manager(flavour, page=page, blocks=blocks)

    def load(self) -> "StandIn":
        """What the model loader does: the checkpoint's tensors as they are stored, in fp32."""
        tensors = {name: value.float() for name, value in load_file(self.draft / "model.safetensors").items()}
        self.model.load_draft_weights(tensors)
        self.hf.set_taps(self.model.draft_model.config.target_layer_ids)
        return self

    def make_manager(self, flavour: str, *, page: int, blocks: int, **changes: Any) -> None:
        """A new pair of managers, as after an estimation of the KV size."""
        resources = module("_torch.pyexecutor.resource_manager")
        newer = module("_torch.pyexecutor.kv_cache_manager_v2").KVCacheManagerV2
        kind = newer if flavour.startswith("v2") else resources.KVCacheManager
        pretrained = self.model.draft_config.pretrained_config
        sizes = {
            "num_layers": pretrained.num_hidden_layers,
            "width": (getattr(pretrained, "kv_lora_rank", None) or 64) + (getattr(pretrained, "qk_rope_head_dim", None) or 16),
            "dtype": torch.float32,
            "tokens_per_block": page,
            "num_blocks": blocks,
            "max_batch_size": self.max_batch,
            "max_seq_len": self.max_seq_len,
            "filler": -1 if flavour.endswith("-1") else 0,
        }
        self.manager = kind(**{**sizes, **changes})
        self.resources = resources.ResourceManager({resources.ResourceManagerType.DRAFT_KV_CACHE_MANAGER: self.manager})
        self.target_manager = SimpleNamespace(enable_block_reuse=False)
        self.spec_metadata = module("_torch.speculative.utils").get_spec_metadata(
            self.spec_config,
            max_num_requests=self.max_batch,
            max_draft_len=self.K,
            runtime_draft_len=self.K,
            hidden_width=len(self.spec_config.target_layer_ids or (0, 0, 0)) * self.hf.hidden_size,
            max_num_tokens=4096,
        )

    # ------------------------------------------------------------------------------------------------------ requests
    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.hf.stop_token_ids)
        request = Request(len(self.requests) + len(self.done) + 1, tuple(prompt), params, ids, None)
        self.requests.append(request)
        return request.id

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        order = [self.add(prompt, params) for prompt in prompts]
        while not all(request in self.done for request in order):
            self.step()
        return [self.done.pop(request) for request in order]

    # ---------------------------------------------------------------------------------------------------------- step
    def grant(self, request: Request, tokens: int) -> None:
        """Draft pages for a request's tokens. A refused resize leaves what there is; see `test_hosted_worker`."""
        if not self.manager.resize(request.id, tokens):
            self.events.append(f"no pages for request {request.id}")

    def step(self) -> dict[str, torch.Tensor]:
        """One iteration over at most `max_batch` requests that are not absent."""
        running = [request for request in self.requests if request.id not in self.absent][: self.max_batch]
        prompts = [request for request in running if request.pending]
        decoding = [request for request in running if not request.pending]
        batch = prompts + decoding
        lengths = [min(request.pending, self.chunk or request.pending) for request in prompts] + [self.K + 1] * len(decoding)
        for request, length in zip(batch, lengths, strict=True):
            if request.pending:
                self.grant(request, request.computed + length + self.K - 1)
            else:
                self.grant(request, self.manager.capacity_of(request.id) + 1 + self.K)
        rows = [list(request.sequence[request.computed :][:length]) for request, length in zip(prompts, lengths, strict=False)]
        rows += [[request.anchor, *request.drafts] for request in decoding]
        attn = self.attention_metadata(batch, lengths, len(prompts))
        spec = self.spec_metadata
        spec.request_ids, spec.num_generations = attn.request_ids, len(decoding)
        spec.draft_tokens = torch.tensor([request.drafts for request in decoding], dtype=torch.int)
        ends = torch.tensor(lengths).cumsum(0)
        spec.gather_ids = torch.cat(
            (ends[: len(prompts)] - 1, torch.arange(int(sum(lengths[: len(prompts)])), int(sum(lengths))))
        )
        positions = [range(request.computed, request.computed + len(ids)) for request, ids in zip(batch, rows, strict=True)]
        with torch.inference_mode():
            spec.prepare()
            self.before_step()
            out = self.model(
                attn,
                torch.tensor([token for ids in rows for token in ids]),
                torch.tensor([[position for run in positions for position in run]]),
                spec,
                self.resources,
            )
        self.steps += 1
        for index, request in enumerate(batch):
            self.commit(request, lengths[index], out, index)
        return out

    def attention_metadata(self, batch: Sequence[Request], lengths: Sequence[int], prompts: int) -> Any:
        offsets = torch.full((1, self.max_batch, 2, self.manager.max_blocks_per_seq), -7777, dtype=torch.int32)
        ids = [request.id for request in batch]
        self.manager.copy_batch_block_offsets(offsets, ids, 1, prompts, len(ids))
        return SimpleNamespace(
            num_seqs=len(batch),
            num_contexts=prompts,
            num_ctx_tokens=sum(lengths[:prompts]),
            _seq_lens=torch.tensor(lengths, dtype=torch.int32),
            request_ids=ids,
            max_seq_len=self.max_seq_len,
            draft_kv_cache_block_offsets=offsets,
            kv_cache_manager=self.target_manager,
        )

    def commit(self, request: Request, length: int, out: dict[str, torch.Tensor], index: int) -> None:
        request.drafts, drafts = out["next_draft_tokens"][index].tolist(), request.drafts
        if request.pending:
            request.computed += length
            if request.pending:  # more of the prompt is to come
                return
            request.commit([int(out["new_tokens"][index, 0])], submitted=0, prefill=True)
        else:
            count = int(out["new_tokens_lens"][index])
            commit = request.commit(out["new_tokens"][index, :count].tolist(), submitted=len(drafts))
            kept = len(commit.tokens)
            self.hf.take_back(self.target.caches[request.id], length - kept)
            request.computed += kept
            self.manager.resize(request.id, self.manager.capacity_of(request.id) - (length - count))
        if request.finish is not None:
            self.requests.remove(request)
            self.target.caches.pop(request.id)
            self.manager.free_resources(request.id)
            self.done[request.id] = request.completion()
