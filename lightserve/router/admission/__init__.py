"""Admission: which waiting requests may start, by memory; the rules by name."""

from __future__ import annotations

from collections.abc import Callable

from lightserve.config import ServeConfig
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import (
    AggressiveAdmission,
    ConservativeAdmission,
    EmaAdmission,
)
from lightserve.router.admission.past_future import PastFutureAdmission
from lightserve.router.admission.risk import RiskAdmission
from lightserve.router.output_lengths import OutputLengths

AdmissionFactory = Callable[[ServeConfig, OutputLengths, int], AdmissionRule]
"""Makes a rule from the configuration, the length history and a seed."""

ADMISSION_RULES: dict[str, AdmissionFactory] = {
    "conservative": lambda config, lengths, seed: ConservativeAdmission(
        overcommit=config.overcommit
    ),
    "aggressive": lambda config, lengths, seed: AggressiveAdmission(watermark=config.watermark),
    "ema": lambda config, lengths, seed: EmaAdmission(lengths),
    "past-future": lambda config, lengths, seed: PastFutureAdmission(
        lengths, seed=seed, reserve=config.reserve, samples=config.samples
    ),
    "risk": lambda config, lengths, seed: RiskAdmission(
        lengths, seed=seed, rt_risk=config.rt_memory_risk, be_risk=config.be_memory_risk
    ),
}
"""Factories of the choices of --admission."""
