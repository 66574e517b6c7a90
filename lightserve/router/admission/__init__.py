"""Admission: which waiting requests may start, by memory; the rules by name."""

from __future__ import annotations

from collections.abc import Callable

from lightserve.config import ServeConfig
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import (
    AggressiveAdmission,
    ConservativeAdmission,
    EmaAdmission,
    PastFutureAdmission,
)
from lightserve.router.admission.risk import AcceptedRisk, RiskAdmission
from lightserve.router.output_lengths import OutputLengths

AdmissionFactory = Callable[[ServeConfig, OutputLengths, AcceptedRisk, int], AdmissionRule]
"""Makes a rule from the configuration, what was learnt of lengths and evictions, and a seed."""

ADMISSION_RULES: dict[str, AdmissionFactory] = {
    "conservative": lambda config, lengths, risk, seed: ConservativeAdmission(
        overcommit=config.overcommit
    ),
    "aggressive": lambda config, lengths, risk, seed: AggressiveAdmission(
        watermark=config.watermark
    ),
    "ema": lambda config, lengths, risk, seed: EmaAdmission(lengths),
    "past-future": lambda config, lengths, risk, seed: PastFutureAdmission(
        lengths, seed=seed, reserve=config.reserve, samples=config.samples
    ),
    "risk": lambda config, lengths, risk, seed: RiskAdmission(lengths, risk, seed=seed),
}
"""Factories of the choices of --admission."""
