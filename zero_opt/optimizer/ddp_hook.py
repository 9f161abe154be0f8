"""A communication hook for ``DistributedDataParallel``: our reduce-scatter in place of its all-reduce.

DDP compares the hook's annotations with the classes themselves, so here they are not deferred.
"""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ..comm.backend_exchanges import ddp_average
from ..errors import ConfigConflict, ConfigTypeError
from ..sharding.late_params import Unwatched
from ..system.inference_mode import outside_inference_mode
from .sharded_optimizer import ShardedOptimizer


def ddp_hook(optimizer: ShardedOptimizer, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Hand the gradients of a bucket to an optimizer with ``reduction=DDPHook()``; DDP calls it on every rank.

    ``ddp.register_comm_hook(opt, zero_opt.ddp_hook)``, before the first backward. Half the bytes of DDP's all-reduce
    are sent, and as with :class:`Overlapped` ``p.grad`` cannot be read after a backward that DDP synchronizes: clip
    with ``max_grad_norm`` or ``opt.clip_grad_norm_()``. To accumulate, ``ddp.no_sync()`` is what saves
    traffic. DDP must be over the optimizer's ranks. With ``gradient_as_bucket_view=True`` each gradient is copied once
    more. Once the optimizer is closed, this is DDP's own all-reduce.

    Args:
        optimizer: with ``reduction=DDPHook()``; what ``register_comm_hook`` was given as the hook's state.
        bucket: from DDP: gradients of several parameters, in one flat tensor.

    Returns:
        A future that is complete: the bucket's own tensor, which DDP copies from, or as all-reduced once it is closed.

    Raises:
        ConfigTypeError, ConfigConflict: not such an optimizer, a wrapper has rounded the bucket, or DDP trains
            parameters that the optimizer has not.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise ConfigTypeError(
            f"register_comm_hook(opt, zero_opt.ddp_hook) needs a ShardedOptimizer, got {type(optimizer).__name__}"
        )
    if not isinstance(bucket, GradBucket):
        raise ConfigConflict(
            'torch._dynamo.config.optimize_ddp="python_reducer" reduces gradients one by one; leave it at True, or use '
            "reduction=zero_opt.AlreadyReduced() without the hook"
        )
    of_params = bucket.parameters()[0].dtype
    if bucket.buffer().dtype not in (of_params, of_params.to_real()):  # DDP gives complex gradients as real ones
        raise ConfigConflict(
            "a wrapper (fp16_compress_wrapper, say) has rounded the bucket given to zero_opt.ddp_hook, which sends "
            "gradients as they were; register the hook itself, and set MixedPrecision(reduce_dtype=...)"
        )
    group = optimizer._engine.group
    if optimizer._closed and group.world_size > 1:  # DDP keeps its hook; what else trains the model needs the mean
        return ddp_average(group.parent, bucket)
    with outside_inference_mode(), Unwatched():
        if not optimizer._closed:
            optimizer._engine.take_bucket(bucket)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
