"""Faults that the tests must catch: each breaks one line of the algorithms, the loop or the rollouts.

Run as ``python bench/mutations.py [PATTERN ...]``, with patterns of names such as ``'clip*'``. The tracked
files are copied to a temporary directory. There every fault is made by itself, the tests named beside it run,
and the file is restored. Prints ``caught`` or ``SURVIVED`` for each and ends with status 1 if any survived.
``--list`` prints the faults. A meta test checks that each text still stands once in its file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BACKENDS = ("cpu", "cuda", "npu")
CAUGHT, PASSED = 1, 0
"""Exit codes of pytest: a test failed, and all passed."""

ACTORS, ESTIMATE = "core/anygauge/trainer/actors.py", "core/anygauge/trainer/estimate.py"
LOOP = "core/anygauge/trainer/loop.py"
ALGORITHMS, CONTROL = "core/anygauge/algorithms", "core/anygauge/rollout"
LOSSES, CORRECTION = f"{ALGORITHMS}/losses.py", f"{ALGORITHMS}/correction.py"
OPTIONS = "core/anygauge/engines/megatron/options.py"
SCHEDULE = "core/anygauge/engines/megatron/optimizer.py"

UNIT, STEPS = "tests/unit", "tests/unit/rollout/producer"
POLICY_LOSSES = f"{UNIT}/algorithms/test_policy_losses.py"
KEYS = f"{UNIT}/trainer/test_objective_keys.py::test_a_key_does_what_its_formula_says"
CORRECTIONS = f"{UNIT}/algorithms/test_correction.py::test_every_weight_is_that_of_a_loop_over_tokens"
ADAMW = f"{UNIT}/engines/test_megatron_engine.py::test_steps_follow_adamw"


class Edit(NamedTuple):
    """A text that stands once in a file, and what takes its place."""

    path: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A fault, and tests: at least one of them must fail."""

    name: str
    edits: Sequence[Edit]
    tests: Sequence[str]


def fault(name: str, path: str, old: str, new: str, *tests: str) -> Mutation:
    """Return a fault of one line."""
    return Mutation(name, [Edit(path, old, new)], tests)


WIRING = [
    fault("clip_low", ACTORS, "clip_low=algorithm.clip_low", "clip_low=0.2", KEYS),
    fault("clip_high", ACTORS, "clip_high=algorithm.clip_high", "clip_high=algorithm.clip_low", KEYS),
    fault("dual_clip", ACTORS, "dual_clip=algorithm.dual_clip", "dual_clip=None", KEYS),
    fault("kl_coef", ACTORS, "kl_coef=algorithm.kl_coef,\n        kl_type", "kl_type", KEYS),
    fault("kl_type", ACTORS, "kl_type=algorithm.kl_type", 'kl_type="k3"', KEYS),
    fault("entropy_coef", ACTORS, "entropy_coef=algorithm.entropy_coef,", "", KEYS),
    fault(
        "entropy gradient",
        ACTORS,
        "entropy_grad=self.config.algorithm.entropy_coef > 0",
        "entropy_grad=False",
        KEYS,
    ),
    fault("distill_kl_coef", ACTORS, "distill_kl_coef=algorithm.distill_kl_coef,", "", KEYS),
    fault("correction", ACTORS, "if algorithm.correction:", "if False:", KEYS),
    fault("correction options", ACTORS, "partial(find(name).fn, **options)", "partial(find(name).fn)", KEYS),
    fault("policy_loss", ACTORS, "losses(algorithm.policy_loss).fn", 'losses("ppo_clip").fn', KEYS),
    fault("old_log_probs", ACTORS, ' or self.config.algorithm.old_log_probs == "rollout"', "", KEYS),
    fault("value_clip", ACTORS, "clip=self.config.critic.value_clip", "clip=0.2", KEYS),
    fault("reference.path", ACTORS, "config.reference.path or config.model.path", "config.model.path", KEYS),
    fault("temperature", ACTORS, "else self.config.rollout.temperature", "else 1.0", KEYS),
    fault("normalize_advantages", ESTIMATE, "    if algorithm.normalize_advantages:", "    if False:", KEYS),
    fault(
        "advantage_options of tokens",
        ESTIMATE,
        "estimator.fn(inputs, **algorithm.advantage_options)",
        "estimator.fn(inputs)",
        KEYS,
    ),
    fault("distill_coef", ESTIMATE, "algorithm.distill_coef * (inputs", "1.0 * (inputs", KEYS),
    fault("kl_reward_coef", ESTIMATE, "kl_coef=algorithm.kl_reward_coef", "kl_coef=1.0", KEYS),
    fault(
        "advantage_options of groups",
        ESTIMATE,
        "dtype=torch.float32), **algorithm.advantage_options)",
        "dtype=torch.float32))",
        KEYS,
    ),
    fault(
        "distill_top_k",
        "core/anygauge/trainer/teacher.py",
        "config.algorithm.distill_top_k if",
        "64 if",
        KEYS,
    ),
    fault(
        "aggregation", LOOP, "        config.algorithm.loss_aggregation,\n", '        "token_mean",\n', KEYS
    ),
    fault("max_new_tokens", LOOP, "        config.rollout.max_new_tokens,\n", "        8,\n", KEYS),
    fault("optimizer_steps", LOOP, "        config.optimizer_steps,\n", "        2,\n", KEYS),
    fault(
        "mask_stale",
        LOOP,
        "mask_stale(groups, version, config.algorithm.mask_stale)",
        "mask_stale(groups, version, None)",
        KEYS,
    ),
    Mutation(
        "five keys at once",
        [
            Edit(ACTORS, "clip_high=algorithm.clip_high", "clip_high=algorithm.clip_low"),
            Edit(ACTORS, "dual_clip=algorithm.dual_clip", "dual_clip=None"),
            Edit(ACTORS, "kl_type=algorithm.kl_type", 'kl_type="k3"'),
            Edit(ACTORS, ' or self.config.algorithm.old_log_probs == "rollout"', ""),
            Edit(ESTIMATE, "    if algorithm.normalize_advantages:", "    if False:"),
        ],
        [KEYS],
    ),
    Mutation(
        "kl_coef and entropy_coef at once",
        [
            Edit(ACTORS, "kl_coef=algorithm.kl_coef,\n        kl_type", "kl_type"),
            Edit(ACTORS, "entropy_coef=algorithm.entropy_coef,", ""),
        ],
        [KEYS],
    ),
    fault("adam_betas", OPTIONS, '"adam_beta2": train.adam_betas[1]', '"adam_beta2": 0.999', ADAMW),
    fault("adam_eps", OPTIONS, '"adam_eps": train.adam_eps', '"adam_eps": 1e-8', ADAMW),
    Mutation(
        "weight_decay",  # the schedule sets it before each step
        [
            Edit(SCHEDULE, "start_wd=train.weight_decay", "start_wd=0.0"),
            Edit(SCHEDULE, "end_wd=train.weight_decay", "end_wd=0.0"),
        ],
        [ADAMW],
    ),
    fault("clip_grad", OPTIONS, '"clip_grad": train.clip_grad', '"clip_grad": 1.0', ADAMW),
]
"""Keys that no longer reach what reads them."""

FORMULAS = [
    fault(
        "grpo: population deviation",
        f"{ALGORITHMS}/advantages.py",
        "(rewards_G.std() + eps)",
        "(rewards_G.std(correction=0) + eps)",
        f"{UNIT}/algorithms/test_advantages.py::test_centers_and_scales",
        KEYS,
    ),
    fault(
        "grpo: both switches off",
        f"{ALGORITHMS}/advantages.py",
        "if not center and not scale:",
        "if False:",
        f"{UNIT}/algorithms/test_advantages.py::test_both_switches_off_keep_the_rewards_of_an_equal_group",
    ),
    fault(
        "constant_length: other divisor",
        f"{ALGORITHMS}/aggregation.py",
        "(max_length * num_samples)",
        "(counts.max() * num_samples)",
        KEYS,
    ),
    fault(
        "failed samples counted",
        f"{ALGORITHMS}/aggregation.py",
        "(counts > 0).sum()",
        "torch.tensor(len(counts))",
        f"{UNIT}/algorithms/test_aggregation.py::test_a_sample_that_does_not_count_is_no_sample",
    ),
    fault(
        "gspo: ratio of tokens",
        LOSSES,
        "sample_means(log_probs - x.old_log_probs, x)",
        "(log_probs - x.old_log_probs)",
        f"{POLICY_LOSSES}::test_gspo_has_one_ratio_for_each_sample",
    ),
    fault(
        "gspo: gradient of the sequence",
        LOSSES,
        "(log_ratio + (x.log_probs - log_probs))",
        "(log_ratio + sample_means(x.log_probs - log_probs, x))",
        f"{POLICY_LOSSES}::test_gspo_by_hand",
        KEYS,
    ),
    fault(
        "cispo: weight with gradient",
        LOSSES,
        "ratio = _ratio(inputs).detach()\n    weight",
        "ratio = _ratio(inputs)\n    weight",
        f"{POLICY_LOSSES}::test_cispo_weighs_the_gradient_of_every_token",
    ),
    fault(
        "kl of rewards: sign",
        ESTIMATE,
        "kl = old - reference",
        "kl = reference - old",
        f"{UNIT}/trainer/test_estimate.py::test_the_penalty_is_the_log_ratio_to_the_reference",
    ),
    fault(
        "icepop truncates",
        CORRECTION,
        'return mis(inputs, level="token", low=low, high=high)',
        'return tis(inputs, level="token", low=low, high=high)',
        CORRECTIONS,
    ),
    fault(
        "veto: the token alone",
        CORRECTION,
        "sample_sums(caught.to(inputs.loss_weights.dtype), inputs) == 0",
        "~caught",
        CORRECTIONS,
    ),
    fault(
        "sequence_mask: good samples",
        CORRECTION,
        "(inputs.advantages < 0) & (sample_means",
        "(inputs.advantages > 0) & (sample_means",
        CORRECTIONS,
    ),
    fault(
        "chi2_sequence: weighed by tokens",
        f"{ALGORITHMS}/corrected_loss.py",
        "(value * shares).sum()",
        "(value * x.loss_weights).sum()",
        f"{UNIT}/algorithms/test_corrected_loss.py::test_what_is_of_samples_is_a_mean_over_samples_whatever_the_aggregation",
    ),
]
"""Formulas that say something else."""

RUNS = [
    fault(
        "warmup_steps: the policy is trained",
        ACTORS,
        "            if update_policy:\n",
        "            if True:\n",
        KEYS,
        "tests/integration/test_roles.py::test_the_warm_up_leaves_the_policy_as_it_is",
    ),
    fault(
        "warmup_steps: off by one",
        LOOP,
        "step > loop.config.critic.warmup_steps",
        "step >= loop.config.critic.warmup_steps",
        KEYS,
    ),
    fault(
        "mask_stale: off by one",
        "core/anygauge/trainer/staleness.py",
        "oldest = version - max_lag\n",
        "oldest = version - max_lag - 1\n",
        f"{UNIT}/trainer/test_staleness.py::test_tokens_older_than_the_bound_are_masked",
    ),
    fault(
        "fan-out: each part weighs as a rollout",
        f"{ALGORITHMS}/aggregation.py",
        "if rollouts is None else",
        "if True else",
        f"{UNIT}/trainer/test_plan.py::test_a_rollout_of_several_samples_is_in_one_optimizer_step_and_weighs_as_one",
    ),
    fault(
        "filters ignored",
        f"{CONTROL}/rollout_task.py",
        "        if not passed:",
        "        if False:",
        f"{STEPS}/test_producer_steps.py::test_a_filter_has_other_prompts_drawn_until_enough_groups_pass",
    ),
    fault(
        "partial samples: budget begins anew",
        f"{CONTROL}/live.py",
        "max_new_tokens=limit - have)",
        "max_new_tokens=limit)",
        f"{STEPS}/test_partial_samples.py::test_a_sample_goes_on_after_a_cut_at_any_token",
    ),
    fault(
        "staleness: no bound",
        f"{CONTROL}/staleness.py",
        "return next_version + untaken // self.groups_per_step - version <= self.max_versions",
        "return True",
        f"{STEPS}/test_continuous.py::test_no_group_is_older_than_the_bound_though_it_is_the_last",
    ),
    fault(
        "after_sample not called",
        f"{CONTROL}/rollout_task.py",
        "apply_hooks(functions.after_sample, sample, prompt)",
        "apply_hooks((), sample, prompt)",
        f"{STEPS}/test_rollout_functions.py::test_functions_see_each_sample_in_order_before_it_is_scored",
    ),
    fault(
        "answers of tools are trained on",
        "core/anygauge/rollout/gateway/trajectories.py",
        "[0] * len(between)",
        "[1] * len(between)",
        f"{UNIT}/rollout/gateway/test_gateway_openai.py::test_a_tool_loop_is_one_sample_with_the_very_tokens",
    ),
    fault(
        "shared turns are trained on twice",
        "core/anygauge/rollout/gateway/trajectories.py",
        "        trained.update(fresh)\n",
        "",
        f"{UNIT}/rollout/gateway/test_gateway_history.py::test_an_edit_of_a_late_message_keeps_the_exact_beginning",
    ),
]
"""Rollouts and steps that do something else."""

MUTATIONS = [*WIRING, *FORMULAS, *RUNS]


def main() -> int:
    """Run the faults and return how to exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [each for each in MUTATIONS if any(fnmatch(each.name, one) for one in options.patterns)]
    if options.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_tracked(tree)
        tests = sorted({test for each in chosen for test in each.tests})
        if run_tests(tree, tests) != PASSED:
            print("the tests fail without any fault", file=sys.stderr)
            return 2
        survivors = [each.name for each in chosen if not is_caught(tree, each)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return int(bool(survivors))


def copy_tracked(target: Path) -> None:
    """Copy the files of the working tree that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def is_caught(tree: Path, mutation: Mutation) -> bool:
    """Return whether a test sees a fault, and print it."""
    started = time.monotonic()
    with broken(tree, mutation.edits):
        status = run_tests(tree, mutation.tests, "--exitfirst")
    found = {CAUGHT: "caught", PASSED: "SURVIVED"}.get(status, f"SURVIVED (pytest ended with {status})")
    print(f"{mutation.name:<42}{found:<10}{time.monotonic() - started:6.1f} s", flush=True)
    return status == CAUGHT


@contextmanager
def broken(tree: Path, edits: Sequence[Edit]) -> Iterator[None]:
    """Make the edits for the time of the block."""
    before = {edit.path: (tree / edit.path).read_text(encoding="utf-8") for edit in edits}
    after = dict(before)
    for edit in edits:
        assert after[edit.path].count(edit.old) == 1, f"{edit.path} has not one {edit.old!r}"
        after[edit.path] = after[edit.path].replace(edit.old, edit.new)
    try:
        write(tree, after)
        yield
    finally:
        write(tree, before)


def write(tree: Path, texts: dict[str, str]) -> None:
    """Write files."""
    for path, text in texts.items():
        (tree / path).write_text(text, encoding="utf-8")


def run_tests(tree: Path, tests: Sequence[str], *arguments: str) -> int:
    """Return what pytest ends with in the copy, whose packages stand before those that are installed."""
    backends = (f"backends/{name}" for name in BACKENDS)
    packages = [tree / name for name in ("core", "hooks", "models", *backends, "tests/support")]
    # A file that is changed twice in a second has one time stamp: no bytecode is kept.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *tests]
    return subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True).returncode


if __name__ == "__main__":
    sys.exit(main())
