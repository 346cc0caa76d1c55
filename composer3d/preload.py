"""What the forkserver imports before it forks workers: the slow imports of a rank, paid once a node."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    import composer3d.train

__all__: list[str] = []
