"""Peak memory and time of the loss from hidden states: fused, against logits of all tokens.

Forward and backward, with the float32 main gradient that training has anyway. All rows of a table are of one
run, of the same random inputs; on the host each has a process of its own.

``fused``      the op ``linear_logprob`` of the backend, which keeps logits in a tenth of the free memory
``kernel``     the backend's ``vocab_parallel_logprob`` on all logits
``plain``      torch's log softmax of all logits in float32, by autograd
``written``    all logits in float32, one autograd function written by hand, whose backward overwrites them
``compiled``   the same with both passes by ``torch.compile``
``products``   no loss: the four products of the fused op, each over all tokens and the whole vocabulary
``tiles``      the same, tile by tile as the op makes them

    python bench/loss_memory.py                        # 512, 2048 and 8192 tokens on the host, minutes
    python bench/loss_memory.py --entropy-grad --tokens 32768   # where a GPU is present
    python bench/loss_memory.py --clock cpu --threads 1   # on a host with other work: processor time
    python bench/loss_memory.py --budget 0             # GiB of logits that fused keeps for backward
    python bench/loss_memory.py --tile 4096x4096       # another tile, in tokens x vocabulary rows
    python bench/loss_memory.py --ranks 1 2 --entropy-grad   # the vocabulary divided among processes
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
PATHS = ("fused", "kernel", "plain", "written", "compiled", "products", "tiles")
HOST_PATHS = ("fused", "kernel", "plain")


# -------------------------------------------------------------------------
# One figure
# -------------------------------------------------------------------------


def measure(args: argparse.Namespace, path: str, tokens: int) -> dict[str, float]:
    """Return milliseconds and MiB of one path, in this process."""
    device = device_of(args)
    hidden, weight, targets, grads = make_inputs(args, tokens, device)
    run = PRODUCTS.get(path)
    if run is not None:
        return clock(functools.partial(run, hidden.detach(), weight.detach(), weight.main_grad), args, device)
    logprob = paths(args, device)[path]
    step = functools.partial(train, logprob, hidden, weight, targets, grads, args.entropy_grad)
    if device.type == "cpu":
        small = [x[:64].detach().clone().requires_grad_() for x in (hidden, weight)]
        logprob(*small, targets[:64] % 64, 1.0, None, entropy_grad=args.entropy_grad)[0].sum().backward()
    elif args.trace:
        trace(step)
    else:
        step()
    return clock(step, args, device)


def device_of(args: argparse.Namespace) -> Any:
    """Return the accelerator, or the host with its threads."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    return device


def make_inputs(args: argparse.Namespace, tokens: int, device: Any) -> tuple[Any, Any, Any, Any]:
    """Return hidden states, the weight with its main gradient, targets and gradients of log-probabilities."""
    import torch

    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, args.dtype)}
    hidden = torch.randn(tokens, args.hidden, **options).requires_grad_()
    weight: Any = torch.nn.Parameter(torch.randn(args.vocab, args.hidden, **options).mul_(args.hidden**-0.5))
    weight.main_grad = torch.ones(weight.shape, device=device)
    targets = torch.randint(args.vocab, (tokens,), device=device)
    return hidden, weight, targets, torch.randn(tokens, device=device)


def train(
    logprob: Any,
    hidden: Any,
    weight: Any,
    targets: Tensor,
    grads: Tensor,
    entropy_grad: bool,
    group: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run forward and backward; return log-probabilities, entropies and the gradient of the hidden states."""
    weight.grad_added_to_main_grad = False
    found = logprob(hidden, weight, targets, 1.0, group, entropy_grad=entropy_grad)
    loss = (found[0] * grads).sum() + (found[1].sum() if entropy_grad else 0.0)
    loss.backward()
    if not weight.grad_added_to_main_grad:
        weight.main_grad.add_(weight.grad)  # as Megatron's hook does
    gradient = hidden.grad
    hidden.grad = weight.grad = None
    return found[0].detach(), found[1].detach(), gradient


def clock(run: Any, args: argparse.Namespace, device: Any) -> dict[str, float]:
    """Return the shortest time and the peak of memory above what there was before."""
    import torch

    host = device.type == "cpu"
    seconds = time.process_time if args.clock == "cpu" else time.perf_counter
    if host:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        run()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
    times = []
    for _ in range(args.runs):
        synchronize(host)
        start = seconds()
        run()
        synchronize(host)
        times.append(seconds() - start)
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if host
        else torch.accelerator.max_memory_allocated()
    )
    return {"ms": min(times) * 1e3, "mib": (peak - before) / MIB}


def trace(run: Any) -> None:
    """Print what the accelerator does most of the time."""
    import torch

    run()
    with torch.profiler.profile() as found:
        run()
        synchronize(host=False)
    print(
        found.key_averages().table(sort_by="self_device_time_total", row_limit=12, max_name_column_width=80)
    )


def synchronize(host: bool) -> None:
    """Wait for the accelerator."""
    if not host:
        import torch

        torch.accelerator.synchronize()


# -------------------------------------------------------------------------
# The ways to compute the loss
# -------------------------------------------------------------------------


def paths(args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Return the ways to compute the loss, each with the signature of ``linear_logprob``."""
    import torch
    import torch.nn.functional as F

    from anygauge.kernels import linear_logprob
    from anygauge.kernels.loss_budget import LossBudget
    from anygauge.kernels.table import resolve_kernels
    from anygauge.plugins import load_plugins

    plugins = load_plugins()
    backend = plugins.get("register_backends", device.type)
    budget = LossBudget(args.budget, plugins.make_device(backend, device.index or 0))
    table = resolve_kernels(plugins, backend, budget)
    if args.tile:
        linear_logprob.HOST_TILE = linear_logprob.DEVICE_TILE = args.tile

    def kernel(hidden: Tensor, weight: Tensor, *given: Any, entropy_grad: bool) -> Any:
        fn = table.resolve("vocab_parallel_logprob", dtype=args.dtype)
        return fn(F.linear(hidden, weight), *given, entropy_grad=entropy_grad)

    compiled = [torch.compile(fn, dynamic=False) for fn in (summarize, derived)]
    return {
        "fused": table.resolve("linear_logprob", dtype=args.dtype),
        "kernel": kernel,
        "plain": plain,
        "written": functools.partial(written, summarize, derive),
        "compiled": functools.partial(written, *compiled),
    }


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, group: None, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies from torch's own log softmax of all logits."""
    import torch
    import torch.nn.functional as F

    logprobs = torch.log_softmax(F.linear(hidden, weight).float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_grad):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def summarize(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each row's sum of exponentials, and its entropy."""
    total = logits.logsumexp(1)
    return total, total - (logits - total[:, None]).exp_().mul_(logits).sum(1)


def derive(
    logits: Tensor, total: Tensor, entropy: Tensor, slope: Tensor, level: Tensor, dtype: Any
) -> Tensor:
    """Return the derivatives by the logits, but for targets; overwrites the logits."""
    log_softmax = logits.sub_(total[:, None])
    softmax = log_softmax.exp()
    level = level[:, None] - slope[:, None] * entropy[:, None]
    return log_softmax.mul_(slope[:, None]).sub_(level).mul_(softmax).to(dtype)


def derived(
    logits: Tensor, total: Tensor, entropy: Tensor, slope: Tensor, level: Tensor, dtype: Any
) -> Tensor:
    """Return the same, and leave the logits alone: in one kernel that saves writing them."""
    log_softmax = logits - total[:, None]
    level = level[:, None] - slope[:, None] * entropy[:, None]
    return ((log_softmax * slope[:, None] - level) * log_softmax.exp()).to(dtype)


def written(
    summarize: Any,
    derive: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: None,
    *,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of one autograd function, for a temperature of 1."""
    import torch

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            logits = widened(hidden, weight.t())
            total, entropy = summarize(logits)
            ctx.logits, ctx.rows = logits, (total, entropy)
            ctx.save_for_backward(hidden, weight)
            return logits.gather(1, targets[:, None]).squeeze(1) - total, entropy

        @staticmethod
        def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor]:
            hidden, weight = ctx.saved_tensors
            total, entropy = ctx.rows
            slope = -grad_entropy if entropy_grad else torch.zeros_like(grad)
            factor = derive(ctx.logits, total, entropy, slope, grad, hidden.dtype)
            del ctx.logits
            factor.scatter_add_(1, targets[:, None], grad[:, None].to(factor.dtype))
            return factor @ weight, factor.t() @ hidden

    found: tuple[Tensor, Tensor] = Loss.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return found


def widened(a: Tensor, b: Tensor) -> Tensor:
    """Return the product in float32, by the device's own where it has one."""
    import torch

    return (a @ b).float() if a.device.type == "cpu" else torch.mm(a, b, out_dtype=torch.float32)


# -------------------------------------------------------------------------
# The products alone
# -------------------------------------------------------------------------


def whole_products(hidden: Tensor, weight: Tensor, main_grad: Tensor) -> None:
    """Make the logits twice and both gradients of them, each at once and in the dtype of the inputs."""
    for _ in range(2):
        logits = hidden @ weight.t()
    logits @ weight
    logits.t() @ hidden


def tiled_products(hidden: Tensor, weight: Tensor, main_grad: Tensor) -> None:
    """Make the products of the fused op as it makes them, of its tiles and added up in float32."""
    from anygauge.kernels import linear_logprob as op
    from anygauge.kernels.main_grad import add_product

    targets = hidden.new_zeros(len(hidden), 1).long()
    tiles = op._Tiles(hidden, op._VocabShard(weight, 0), targets, 1.0)
    for block in tiles.blocks:
        for number in block:
            tile = tiles.fill(number)
    total = hidden.new_empty(len(tile.logits), hidden.shape[1], dtype=main_grad.dtype)
    for block in tiles.blocks:
        for index, number in enumerate(block):
            tile = tiles.fill(number)
            factor = tile.logits.view(hidden.dtype)[
                :, : tile.logits.shape[1]
            ]  # every second is a rounded logit
            add_product(total[: len(factor)], factor, weight[tile.rows], beta=int(index > 0))
            add_product(main_grad[tile.rows], factor.t(), hidden[tile.tokens])


PRODUCTS = {"products": whole_products, "tiles": tiled_products}


# -------------------------------------------------------------------------
# A divided vocabulary
# -------------------------------------------------------------------------


def measure_ranks(args: argparse.Namespace) -> None:
    """Print a line for each number of processes."""
    import torch

    print(f"{'tokens':>8} {'ranks':>6}{'ms':>10}{'peak MiB':>10}{'of one rank':>13}   furthest from one rank")
    for tokens in args.tokens:
        alone = None
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(run_rank, (ranks, args, tokens, folder), nprocs=ranks)
                with open(f"{folder}/found.json") as file:
                    found = json.load(file)
            alone = alone or found
            ratio = found["ms"] / alone["ms"]
            figures = f"{found['ms']:10.1f}{found['mib']:10.0f}{ratio:13.2f}"
            print(f"{tokens:8} {ranks:6}{figures}   {found['error']}", flush=True)


def run_rank(rank: int, ranks: int, args: argparse.Namespace, tokens: int, folder: str) -> None:
    """Measure one rank's part, after it gave what one rank alone gives; write the slowest one's figures."""
    import torch
    import torch.distributed as dist

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank)
    device = device_of(args)
    dist.init_process_group(
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        device_id=None if device.type == "cpu" else torch.device(device.type, rank),
    )
    logprob = paths(args, device)["fused"]
    hidden, weight, targets, grads = make_inputs(args, tokens, device)
    alone = train(logprob, hidden, weight, targets, grads, args.entropy_grad)
    rows = args.vocab // ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    part: Any = torch.nn.Parameter(weight.detach()[mine].clone())
    part.main_grad = torch.ones(part.shape, device=device)
    group = dist.group.WORLD if ranks > 1 else None
    step = functools.partial(train, logprob, hidden, part, targets, grads, args.entropy_grad, group)
    pairs = [*zip(step(), alone, strict=True), (part.main_grad, weight.main_grad[mine])]
    error = [float((one.double() - other).norm() / other.double().norm()) for one, other in pairs]
    del alone, pairs, weight
    found = clock(step, args, device)
    figures = torch.tensor([found["ms"], found["mib"], *error], device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if rank == 0:
        names = ("log-probs", "entropies", "hidden", "weight")
        text = ", ".join(
            f"{name} {value:.1e}" for name, value in zip(names, figures[2:].tolist(), strict=True)
        )
        with open(f"{folder}/found.json", "w") as file:
            json.dump({"ms": float(figures[0]), "mib": float(figures[1]), "error": text}, file)
    dist.destroy_process_group()


# -------------------------------------------------------------------------
# The command
# -------------------------------------------------------------------------


def figures_of(args: argparse.Namespace, path: str, tokens: int) -> dict[str, float] | None:
    """Return the figures of one path, or ``None`` where it does not fit into memory."""
    import torch

    if not torch.accelerator.is_available():
        return in_own_process(path, tokens, args)
    try:
        return measure(args, path, tokens)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.accelerator.memory.empty_cache()


def in_own_process(path: str, tokens: int, args: argparse.Namespace) -> dict[str, float] | None:
    """Return the figures of one path, or ``None`` where the host kills it."""
    command = [sys.executable, __file__, "--path", path, "--tokens", str(tokens)]
    for name in ("vocab", "hidden", "dtype", "threads", "runs", "clock"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--entropy-grad"] * args.entropy_grad
    command += [] if args.budget is None else ["--budget", str(args.budget)]
    command += ["--tile", "x".join(map(str, args.tile))] if args.tile else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found: dict[str, float] = json.loads(done.stdout)
        return found
    if "out of memory" in done.stderr.lower() or done.returncode < 0:
        return None
    raise SystemExit(done.stderr)


def arguments() -> argparse.Namespace:
    """Return the command line, filled in for the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--tile", type=lambda text: tuple(int(size) for size in text.split("x")))
    parser.add_argument("--budget", type=float, help="GiB; by default a tenth of the free memory")
    parser.add_argument("--entropy-grad", action="store_true")
    parser.add_argument("--paths", nargs="+", choices=PATHS)
    parser.add_argument("--ranks", type=int, nargs="+", help="processes that divide the vocabulary")
    parser.add_argument("--trace", action="store_true", help="print an accelerator's longest kernels")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.path is None:
        import torch

        host = not torch.accelerator.is_available()
        args.tokens = args.tokens or ([512, 2048, 8192] if host else [8192, 32_768])
        args.hidden = args.hidden or (1024 if host else 4096)
        args.dtype = args.dtype or ("float32" if host else "bfloat16")
        args.runs = args.runs or (1 if host else 5)
        args.paths = args.paths or (HOST_PATHS if host else PATHS)
    return args


def main() -> None:
    """Print the table."""
    args = arguments()
    if args.path is not None:
        print(json.dumps(measure(args, args.path, args.tokens[0])))
        return
    print(f"vocabulary {args.vocab}, hidden {args.hidden}, {args.dtype}, entropy grad {args.entropy_grad}")
    if args.ranks:
        measure_ranks(args)
        return
    print(f"{'tokens':>8} {'path':9}{'ms':>10}{'peak MiB':>10}{'fused time':>12}{'fused memory':>14}")
    for tokens in args.tokens:
        fused: dict[str, float] | None = None
        for path in args.paths:
            found = figures_of(args, path, tokens)
            fused = found if path == "fused" else fused
            print(f"{tokens:8} {path:9}{row(found, fused, path)}", flush=True)


def row(found: dict[str, float] | None, fused: dict[str, float] | None, path: str) -> str:
    """Return a line of the table."""
    if found is None:
        return f"{'out of memory':>20}"
    if path in PRODUCTS:
        ratio = f"{fused['ms'] / found['ms']:12.3f}" if fused else ""
        return f"{found['ms']:10.2f}{'':10}{ratio}"
    ratio = f"{fused['ms'] / found['ms']:12.3f}{fused['mib'] / found['mib']:14.3f}" if fused else ""
    return f"{found['ms']:10.2f}{found['mib']:10.0f}{ratio}"


if __name__ == "__main__":
    main()
