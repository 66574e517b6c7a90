"""The admission rules by name."""

from __future__ import annotations

from collections.abc import Callable

from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.conservative import ConservativeAdmission

ADMISSION_RULES: dict[str, Callable[[], AdmissionRule]] = {
    "conservative": ConservativeAdmission,
}
"""Factories of the choices of --admission."""
