"""The drafters that every engine may have, by name, the default first. A new one is a line here."""

from collections.abc import Mapping

from specexport_runtime.drafters import head_kind, lookup, model_kind, self_draft, suffix
from specexport_runtime.drafters.base import DrafterKind

KINDS: Mapping[str, DrafterKind] = {
    "draft-model": model_kind.KIND,
    "head": head_kind.KIND,
    "lookup": lookup.KIND,
    "self": self_draft.KIND,
    "suffix": suffix.KIND,
}
