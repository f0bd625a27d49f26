"""Which module computes a head of which kind."""

from specexport.heads.config import HeadConfig
from specexport.heads.modules import DraftHead


def make_head(config: HeadConfig) -> DraftHead:
    """A head without weights of its own."""
    from specexport.heads.eagle import Eagle3Head, EagleHead
    from specexport.heads.mtp import MtpHead

    kinds = {"eagle3": Eagle3Head, "eagle": EagleHead, "mtp": MtpHead}
    return kinds[config.kind](config)
