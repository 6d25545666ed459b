"""The facts of each kind of head, a row a kind. The rest of the code reads these and does not ask for a kind's name.

How a kind drafts is in `proposers`, and what it minimises in `training`: each has a table from the same names to
classes. A kind of one's own names its classes in its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from heads.dflash import DFlashConfig, DFlashHead
from heads.eagle import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, PEagleConfig, PEagleHead
from heads.flashmap import FlashMapConfig, FlashMapHead
from heads.formats.dflash import DFLASH
from heads.formats.eagle import EAGLE, EAGLE3, PEAGLE
from heads.formats.flashmap import FLASHMAP
from heads.formats.layout import Format
from heads.formats.medusa import HYDRA, MEDUSA
from heads.formats.mtp import MTP
from heads.jump import JumpConfig, JumpHead
from heads.medusa import HydraConfig, HydraHead, MedusaConfig, MedusaHead, MultiTokenConfig, MultiTokenHead
from heads.mtp import MtpConfig, MtpHead
from heads.vocabulary import HeadConfig, VocabularyHead


class Kind:
    """A kind of head. Its name is its network's `kind`.

    network: the class of the head. config: that of its sizes, a frozen dataclass and the only argument of the network.
    proposer, objective: the classes that draft with it and train it; None: those in the tables of their packages. A
    published kind can be in no table of objectives: it is not trained here.
    format: how folders store it. options: those of `draftless train` for the shape of a new head, named as in its
    config. layer: settings of a new head's decoder layers, apart from the target's sizes.
    """

    network: ClassVar[type[VocabularyHead]]
    config: ClassVar[type[HeadConfig]]
    proposer: ClassVar[Any] = None
    objective: ClassVar[Any] = None
    format: ClassVar[Format] = Format()
    options: ClassVar[tuple[str, ...]] = ()
    layer: ClassVar[Mapping[str, Any]] = {}
    begins_as: ClassVar[str] = ""  # another kind, whose heads a training can start from
    in_checkpoint: ClassVar[bool] = False  # the target's own checkpoint has one
    has_own_scale: ClassVar[bool] = False  # of the target's embeddings; else it reads them as the target does
    copies_layer: ClassVar[bool] = False  # of the target: the one between the two hidden states that it reads
    trains_output: ClassVar[bool] = True  # else an output matrix of its own is a copy of the target's
    servers: ClassVar[tuple[str, ...]] = ()  # that have a class for it
    drafts_at_once: ClassVar[bool] = False  # as many tokens as it has heads, in servers
    vllm: ClassVar[Mapping[str, Any]] = {}  # speculative settings, if they are not its name as the method
    vllm_limit: ClassVar[str] = ""  # a comment after its command
    origin: str = ""  # FILE.py:CLASS of a kind that is not ours

    @property
    def name(self) -> str:
        return self.network.kind


class Medusa(Kind):
    network, config, format = MedusaHead, MedusaConfig, MEDUSA
    options = "heads", "layers", "output"
    servers, drafts_at_once, vllm_limit = ("vllm",), True, "  # vllm<=0.32"


class MultiToken(Kind):
    network, config = MultiTokenHead, MultiTokenConfig
    options = "heads", "output", "window"


class Hydra(Kind):
    network, config, format = HydraHead, HydraConfig, HYDRA
    options = "heads", "layers", "output", "prefix"


class Eagle(Kind):
    network, config, format = EagleHead, EagleConfig, EAGLE
    options, layer = ("window",), {"input_norm": False}
    trains_output = False
    servers = "vllm", "sglang"


class Eagle3(Kind):
    network, config, format = Eagle3Head, Eagle3Config, EAGLE3
    options = "layers", "window", "fc_norm", "normed_feedback"
    servers = "vllm", "sglang"


class PEagle(Kind):
    network, config, format = PEagleHead, PEagleConfig, PEAGLE
    options, begins_as = ("heads", "layers", "window", "fc_norm"), "eagle3"
    servers, drafts_at_once, vllm = ("vllm",), True, {"method": "eagle3", "parallel_drafting": True}


class DFlash(Kind):
    network, config, format = DFlashHead, DFlashConfig, DFLASH
    options, layer = ("heads", "layers", "pair_rank", "window"), {"qk_norm": True}
    has_own_scale = True
    servers, drafts_at_once = ("vllm",), True


class FlashMap(Kind):
    network, config, format = FlashMapHead, FlashMapConfig, FLASHMAP


class Jump(Kind):
    network, config = JumpHead, JumpConfig
    options, copies_layer = ("window",), True


class Mtp(Kind):
    network, config, format = MtpHead, MtpConfig, MTP
    in_checkpoint, trains_output = True, False


# In this order a published file is recognized: a module or a head in a whole model's file comes first.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *(Mtp(), Hydra(), Medusa(), FlashMap(), DFlash(), PEagle(), Eagle3(), Eagle()),
        *(MultiToken(), Jump()),
    )
}


def add_kind(kind: Kind, origin: str) -> None:
    """Make a kind of one's own known to this process. origin: its FILE.py:CLASS.

    Raises ValueError if the row lacks something, or if one of ours has its name.
    """
    if missing := [part for part in ("network", "config", "proposer", "objective") if not getattr(kind, part, None)]:
        raise ValueError(f"{origin} lacks {' and '.join(missing)}; a kind of head names these classes")
    if (known := KINDS.get(kind.name)) is not None and not known.origin:
        raise ValueError(f"{origin} is named {kind.name!r}, as a kind of ours; give its network another `kind`")
    kind.origin = origin
    KINDS[kind.name] = kind


def get_kind(name: str, origin: str = "") -> Kind:
    """The row of a kind. origin: where it is from, if that is known. Raises ValueError if it is unknown."""
    if name in KINDS:
        return KINDS[name]
    given = origin or "FILE.py:CLASS"
    raise ValueError(
        f"it is of kind {name!r}, which is not one of ours: name its class, as in --kind {given} (code in a head's "
        "folder is never run)"
    )
