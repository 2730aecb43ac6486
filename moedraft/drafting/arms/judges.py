"""Which judge compares the experts of a drafter."""

from __future__ import annotations

from moedraft.drafting.arms.feature_judge import FeatureJudge
from moedraft.drafting.arms.model_judge import ModelJudge
from moedraft.drafting.drafter import ExpertDrafter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.model import ModelDrafter


def judge_of(drafter: ExpertDrafter, bank: ExpertBank) -> FeatureJudge | ModelJudge | None:
    """What compares the experts of `bank`; None: this drafter has none."""
    if isinstance(drafter, FeatureDrafter):
        return FeatureJudge(drafter, bank)
    return ModelJudge(drafter, bank) if isinstance(drafter, ModelDrafter) else None
