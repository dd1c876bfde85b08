"""A stage of a pipeline without a process group."""

import attrs
from torch import nn


@attrs.frozen
class Stage:
    """What a `torch.distributed.pipelining.PipelineStage` says of itself."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    group: object = None
