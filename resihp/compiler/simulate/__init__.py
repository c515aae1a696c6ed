"""The simulator: when every instruction of a plan starts and ends, given what everything costs.

What is simulated is the plan itself (Eq. 2 of the paper over its instructions), so what is
predicted is what runs:

* A stream runs in order. F, B, W and BW take what `Pricing.compute_s` says of their micro-batch.
* A send is posted and takes no time. The tensor may be used `Pricing.crossing` later, the
  gather of its chunks included, which runs beside the stream's compute. The stream waits at the
  gather or the compute that uses it.
* Tensors between stages have the size of the batch's tokens, whatever the documents. So those of
  one channel have one price and arrive in their order, unless some are cut and others are not:
  then a cut one may overtake (with contention it queues like all others).
* `reduce_grads` waits for all holders of its stage and takes `Pricing.reduce_s`; `step` waits for
  all groups and takes `Pricing.step_s`.
* An overlapped pair starts once the inputs of both are there and takes the time of both.
* With `contention` transfers queue for links (`contention`); without, they do not.
* In a schedule, a result is on its way once it is made; nothing is reduced.

Replicas that do the same at the same prices are played once.
"""

from __future__ import annotations

from resihp.compiler.simulate.result import GroupTime, Peak, Simulation
from resihp.compiler.simulate.simulator import Simulator, simulate

__all__ = ["GroupTime", "Peak", "Simulation", "Simulator", "simulate"]
