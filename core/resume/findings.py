"""`Findings`: collects the drifts, problems and unused leaves that comparing a checkpoint with the run finds."""

from collections.abc import Mapping

import attrs

from trainfold.core.problem import Problem
from trainfold.core.resume.drift import Drift, DriftAction, make_drift, verdict_of


class Findings:
    """Drifts with their verdicts, problems, and saved leaves that are not loaded."""

    def __init__(self, policy: Mapping[str, DriftAction]) -> None:
        self.drifts: list[Drift] = []
        self.problems: list[Problem] = []
        self.ignored: set[str] = set()
        self._policy = policy

    def drift(
        self, kind: str, where: str, *, saved: object, wanted: object, cause: tuple[str, str] | None = None
    ) -> DriftAction:
        """Note a drift and return its verdict.

        A drift with a cause (kind and place) takes the verdict of the cause, unless the policy names its own kind. If the cause is refused,
        only the cause is listed.
        """
        found = make_drift(kind, where, saved=saved, wanted=wanted, policy=self._policy)
        if cause is not None and kind not in self._policy and f"contract:{where}" not in self._policy:
            found = attrs.evolve(found, verdict=verdict_of(*cause, self._policy))
            if found.verdict == "refuse":
                return found.verdict
        self.drifts.append(found)
        return found.verdict
