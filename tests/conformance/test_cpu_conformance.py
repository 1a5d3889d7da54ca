"""The CPU backend passes the shipped suite, and the suite fails a backend that is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anygauge_hooks.kernels import KERNEL_OPS

StartScript = Callable[..., tuple[Any, Path]]
SUITE = "anygauge.testing.conformance"

BROKEN_PLUGIN = '''
import torch
import torch.nn.functional as F
from anygauge.kernels import reference
from anygauge_hooks import hookimpl
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl


def add_rms_norm(x, weight, eps, residual=None):
    """Has no gradient around the norm."""
    total, normed = reference.add_rms_norm(x, weight, eps, residual)
    return total.detach() + 0 * normed, normed


def causal_conv1d(x, weight, lengths):
    """Lets a sequence see the end of the one before it."""
    return reference.causal_conv1d(x, weight, (sum(lengths),))


def gated_delta_rule(q, k, v, g, beta, lengths, scale):
    """Has no gradient of the decay."""
    return reference.gated_delta_rule(q, k, v, g.detach() + 0 * g, beta, lengths, scale)


def grouped_matmul(x, weight, tokens_per_expert):
    """Has no gradient of the weights of the last expert."""
    weight = torch.cat((weight[:-1], weight[-1:].detach()))
    return reference.grouped_matmul(x, weight, tokens_per_expert)


def layer_norm(x, weight, bias, eps):
    """Divides by the root mean square of what it does not center."""
    return reference.rms_norm(x, weight, eps) + bias


def qk_norm_rotary(qkv, q_weight, k_weight, cos, sin, eps):
    """Normalizes keys with the weight of queries."""
    return reference.qk_norm_rotary(qkv, q_weight, q_weight + 0 * k_weight, cos, sin, eps)


def rms_norm(x, weight, eps):
    """Forgets epsilon."""
    return reference.rms_norm(x, weight, 0.0)


def rotary_embedding(q, k, cos, sin):
    """Has the right values, and gradients that are not rotated back."""
    right = reference.rotary_embedding(q, k, cos, sin)
    return tuple(x + (y - x).detach() for x, y in zip((q, k), right))


def swiglu(gate_up):
    """Has no gradient through the gate's activation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.sigmoid(gate).detach() * gate * up


def token_permute(tokens, probs, routing_map, topk):
    """Gives weights that are not chosen a gradient."""
    permuted, weights, rows = reference.token_permute(tokens, probs, routing_map, topk)
    return permuted, weights + 0.1 * (probs.sum() - probs.sum().detach()), rows


def token_unpermute(permuted, rows):
    """Leaves out the last copy of each token, if there are several."""
    return reference.token_unpermute(permuted, rows[:, :-1] if rows.shape[1] > 1 else rows)


def topk_router(logits, topk, *, expert_bias=None, **options):
    """Forgets the bias."""
    return reference.topk_router(logits, topk, **options)


def varlen_attention(q, k, v, lengths, scale, *, window=None, **options):
    """Sees a token less than the window has."""
    window = None if window is None else max(1, window - 1)
    return reference.varlen_attention(q, k, v, lengths, scale, window=window, **options)


def vocab_parallel_logprob(logits, targets, temperature, group, *, entropy_grad):
    """Forgets that the gradient is divided by the temperature."""
    scaled = logits + (logits / temperature - logits).detach()
    return reference.vocab_parallel_logprob(scaled, targets, 1.0, group, entropy_grad=entropy_grad)


def linear_logprob(
    hidden, weight, targets, temperature, group, *, entropy_grad, vocab_size=None, rest=False
):
    """Gives the weight no gradient of the entropy."""
    found = reference.linear_logprob(
        hidden, weight, targets, temperature, group, entropy_grad=False, vocab_size=vocab_size, rest=rest
    )
    entropy = reference.linear_logprob(
        hidden, weight.detach(), targets, temperature, group, entropy_grad=entropy_grad, vocab_size=vocab_size
    )[1]
    return found[0], entropy


@hookimpl
def register_kernels(backend):
    found = [globals()[op] for op in KERNEL_OPS]
    own = [KernelImpl(op=fn.__name__, fn=fn, source="broken", priority=-1) for fn in found]
    coarse = {"source": "coarse", "tolerance": {"float32": (1e-3, 1e-3)}}
    any_result = {"source": "any result", "tolerance": {"float32": (1, 10)}, "tolerance_reason": "is fast"}
    return [
        *own,
        KernelImpl(op="swiglu", fn=reference.swiglu, priority=-2, tolerance_reason="10 bits", **coarse),
        KernelImpl(op="rms_norm", fn=reference.rms_norm, priority=-2, **coarse),
        KernelImpl(op="layer_norm", fn=reference.layer_norm, priority=-2, **any_result),
    ]
'''


IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
OPTIONS = ("-q", "-W", "error", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Done:
    """An ended run of pytest."""

    returncode: int
    printed: str


RunSuite = Callable[..., Done]


@pytest.fixture
def run_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_script: StartScript) -> RunSuite:
    """Return a function that runs pytest in a process that has imported torch, where plugins may be found.

    So do its workers. A user's are cold: a soak runs the suite of an outside backend so (test_third_party).
    """
    monkeypatch.syspath_prepend(tmp_path)

    def run(*arguments: str) -> Done:
        process, output = start_script(
            "pytest", *OPTIONS, "-W", IMPORTED, *arguments, directory=str(tmp_path), has_own=True
        )
        return Done(process.wait(200), output.read_text())

    return run


def test_the_cpu_backend_passes(run_suite: RunSuite) -> None:
    done = run_suite("--pyargs", SUITE, "--backend", "cpu")
    assert done.returncode == 0, done.printed
    assert re.search(r"\d{3} passed", done.printed)


def test_a_wrong_kernel_of_each_op_fails(tmp_path: Path, run_suite: RunSuite) -> None:
    (tmp_path / "broken_kernels.py").write_text(BROKEN_PLUGIN)
    metadata = tmp_path / "broken_kernels-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-kernels\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anygauge.plugins]\nbroken = broken_kernels\n")
    modules = [f"{SUITE}.test_kernels", f"{SUITE}.test_kernels_declared"]
    chosen = "float32-contiguous or wider_tolerance"
    done = run_suite("--pyargs", *modules, "--tb=line", "-k", chosen)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.printed
    failed = re.findall(r"FAILED .*\[([a-z0-9_]+)-.*-float32-contiguous\]", done.printed)
    assert set(failed) == set(KERNEL_OPS), done.printed
    refused = re.findall(r"FAILED .*wider_tolerance.*\[(\w+)\]", done.printed)
    assert set(refused) == {"layer_norm", "rms_norm"}, done.printed
    assert "coarse of swiglu declares a tolerance of (0.001, 0.001) in float32: 10 bits" in done.printed


def test_a_backend_that_is_not_there_is_an_error_and_no_skip(run_suite: RunSuite) -> None:
    done = run_suite("--pyargs", f"{SUITE}.test_device", "--backend", "missing", "--tb=short")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "Unknown backend 'missing'" in done.printed
    assert "skipped" not in done.printed


def test_other_projects_keep_their_own_backend_option(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend', default='theirs')\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(request):\n"
        "    assert request.config.getoption('backend') == 'theirs'\n"
        "    assert not {'torch', 'anygauge.plugins'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
