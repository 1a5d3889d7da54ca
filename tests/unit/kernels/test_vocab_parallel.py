"""Splitting the vocabulary over two processes changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKER = """
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from anygauge.kernels import reference
from anygauge_cpu.logprob import vocab_parallel_logprob

warnings.simplefilter("error")
rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
torch.manual_seed(0)
logits = 4 * torch.randn(33, 24)
targets = torch.randint(24, (33,))
logits[:, 20:] = -torch.inf  # a padded vocabulary; targets there would be a bug of the caller
targets.clamp_(max=19)
logits[5, 12:] = -torch.inf  # and a row that has nothing on the second rank
targets[5] = 3

def run(fn, rows, group, entropy_grad, dtype):
    x = rows.to(dtype).clone().requires_grad_()
    logprob, entropy = fn(x, targets, 0.7, group, entropy_grad=entropy_grad)
    loss = (logprob * torch.arange(33)).sum() + (entropy.square().sum() if entropy_grad else 0)
    (gradient,) = torch.autograd.grad(loss, x)
    return logprob.detach(), entropy.detach(), gradient

half = slice(12 * rank, 12 * rank + 12)
for fn in (reference.vocab_parallel_logprob, vocab_parallel_logprob):
    for entropy_grad in (False, True):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            exact = logits.to(dtype).double()
            whole = run(reference.vocab_parallel_logprob, exact, None, entropy_grad, torch.float64)
            part = run(fn, logits[:, half], dist.group.WORLD, entropy_grad, dtype)
            expected = (whole[0], whole[1], whole[2][:, half])
            for found, wanted in zip(part, expected):
                atol = tolerance * wanted.abs().max().item()
                torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=atol)
dist.destroy_process_group()
"""


def test_two_ranks_equal_one(tmp_path: Path, start_script: Callable[..., Any]) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    ranks = [start_script(script, str(rank), str(tmp_path / "store")) for rank in range(2)]
    for process, output in ranks:
        assert process.wait(120) == 0, output.read_text()
