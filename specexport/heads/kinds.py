"""Which module computes a head of which kind."""

from specexport.heads.config import HeadConfig
from specexport.heads.modules import DraftHead, FeatureProjection


def make_head(config: HeadConfig) -> DraftHead:
    """A head of the configuration's kind, before it is given weights."""
    from specexport.heads.dflash import BlockHead
    from specexport.heads.eagle import Eagle3Head, EagleHead
    from specexport.heads.mtp import MtpHead

    kinds = {"eagle3": Eagle3Head, "eagle": EagleHead, "mtp": MtpHead, "dflash": BlockHead}
    return kinds[config.kind](config)


def make_projection(config: HeadConfig) -> FeatureProjection:
    """What is part of the target's graph for a head, before it is given weights."""
    from specexport.heads.dflash import ContextProjection

    return ContextProjection(config) if config.kind == "dflash" else FeatureProjection(config)
