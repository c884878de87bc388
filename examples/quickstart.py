"""A drafter proposes, a target verifies: the whole loop in a screen. No GPU needed.

python examples/quickstart.py
"""

from pathlib import Path

import torch

from trtllm_dspark import Engine, HuggingFaceTarget, SamplingParams, load_drafter

PAIR = Path(__file__).parent / "tiny_pair"

target = HuggingFaceTarget.from_pretrained(PAIR / "target", dtype=torch.float32)
loaded = load_drafter(PAIR / "draft", target)
for note in loaded.notes:
    print("#", note)

prompt = target.tokenizer("class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, ").input_ids
params = SamplingParams(max_new_tokens=64)
drafted = Engine(target, loaded.drafter, num_drafts=loaded.num_drafts)
plain = Engine(target)

(with_drafts,), (alone,) = drafted.generate([prompt], params), plain.generate([prompt], params)
print(with_drafts.text)
print("# target passes:", len(with_drafts.commits), "instead of", len(alone.commits))
print(f"# accept_len: {drafted.acceptance.summary().accept_len:.2f}")
print("# same tokens as the target alone:", with_drafts.tokens == alone.tokens)
