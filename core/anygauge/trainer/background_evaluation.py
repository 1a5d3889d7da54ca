"""Background evaluation, which runs while training continues.

An evaluation begins with the weights that serve then. An update does not wait for it: what it has under way
goes on with the new weights, as training samples do, and it says how many versions made its tokens.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING

from anygauge.data.media.loader import windows
from anygauge.rollout.context import RolloutContext
from anygauge.rollout.evaluation import sample_groups
from anygauge.rollout.rewards import Scorer
from anygauge.trainer.evaluation import Drawn, eval_draw, record, score_metrics
from anygauge_hooks.rl import NO_VERSION, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anygauge.serving.generation_client import GenerationClient
    from anygauge.trainer.inputs import EvalSet
    from anygauge.trainer.session import Session
    from anygauge_hooks.rl import Prompt, SamplingParams
    from anygauge_hooks.types import RunInfo

__all__ = ["SHARE", "BackgroundEvaluation"]

_log = logging.getLogger(__name__)
SHARE = 4
"""An evaluation has a fourth of the samples under way that training has, if the config does not say."""
SCORED = 32
"""Groups that are scored in one call: those of training wait for no more."""


class BackgroundEvaluation:
    """At most one evaluation at a time, beside training.

    :param rollouts: Most rollouts that training has under way.
    """

    def __init__(self, session: Session, *, rollouts: int) -> None:
        assert session.maker is not None, "engines that answer requests have one"
        self._session = session
        self._making: RolloutContext = session.maker.context
        self._client: GenerationClient = session.maker.client
        self._at_once = session.config.eval.concurrency or max(1, rollouts // SHARE)
        self._under_way: tuple[RunInfo, Future[dict[str, float]]] | None = None

    def start(self) -> None:
        """Begin an evaluation of the weights that serve now, unless the one before is still under way."""
        info = self._session.info
        if self._under_way is not None:
            _log.warning(
                "no evaluation after step %d: that after step %d is still under way",
                info.step,
                self._under_way[0].step,
            )
            return
        self._under_way = info, self._client.loop.start(self._metrics())

    def collect(self) -> None:
        """Record the evaluation that was under way, if it is done.

        :raises RolloutError: The engines failed.
        """
        if self._under_way is not None and self._under_way[1].done():
            (info, answer), self._under_way = self._under_way, None
            record(self._session, info, answer.result())

    def finish(self) -> None:
        """Wait for the evaluation that is under way, if there is one, and record it.

        :raises DeadlineError: It is not done within ``run.timeout_s``.
        :raises RolloutError: The engines failed.
        """
        if self._under_way is not None:
            self._client.wait(_ended(self._under_way[1]), "an evaluation")
        self.collect()

    async def _metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for eval_set in self._session.eval_sets:
            scorer = self._session.scorers.get(eval_set.name)
            if scorer is not None:
                metrics |= await self._of_set(eval_set, scorer)
        return metrics

    async def _of_set(self, eval_set: EvalSet, scorer: Scorer) -> dict[str, float]:
        draw: Drawn = eval_draw(self._session, eval_set)
        groups, scored = await self._groups(*draw), list[Group]()
        for start in range(0, len(groups), SCORED):
            some = groups[start : start + SCORED]
            scored += await asyncio.to_thread(scorer.score, some, tolerant=True)
        versions = {version for own in groups for each in own.samples for version in each.weight_versions}
        metrics = score_metrics(self._session.config, eval_set, scored)
        return {**metrics, f"eval/{eval_set.name}/versions": len(versions - {NO_VERSION})}

    async def _groups(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Return the group of each prompt; what the prompts show is decoded meanwhile."""
        groups: list[Group] = []
        parts = windows(self._session.media, prompts, self._session.config.rollout.prompts_per_step)
        with closing(parts):
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                own = seeds[len(groups) : len(groups) + len(part)]
                groups += await sample_groups(self._making, part, params, own, at_once=self._at_once)
        return groups


async def _ended(answer: Future[dict[str, float]]) -> None:
    await asyncio.gather(asyncio.wrap_future(answer), return_exceptions=True)
