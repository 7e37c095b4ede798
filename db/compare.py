"""Compare two commits case by case: screen all cases, say what is decided and what is not."""

from __future__ import annotations

from db.cases import (
    CaseComparison,
    CaseKey,
    CaseResult,
    Comparison,
    Policy,
    Verdict,
)

__all__ = ["CaseComparison", "CaseKey", "CaseResult", "Comparison", "Policy", "Verdict"]
