"""Say why a case is slow: its floor, what its counters support, and what nobody tested."""

from __future__ import annotations

from db.evidence import (
    CaseDiagnosis,
    Ceilings,
    Claim,
    Diagnosis,
    Evidence,
    EvidencePoint,
    LineFit,
    Status,
)

__all__ = [
    "CaseDiagnosis",
    "Ceilings",
    "Claim",
    "Diagnosis",
    "Evidence",
    "EvidencePoint",
    "LineFit",
    "Status",
]
