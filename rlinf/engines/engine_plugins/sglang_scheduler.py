"""SGLang's scheduler without SGLang's other processes; the caller steps it and gets the results.

The stage's process imports this module, which depends only on torch and SGLang. It applies the same
patches as for servers (:mod:`rlinf.engines.engine_plugins.rlinf_sglang`).
"""

from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import torch
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.managers import scheduler as scheduling
from sglang.srt.managers.io_struct import (
    AbortReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import DynamicGradMode

from rlinf.engines.engine_plugins import rlinf_sglang  # noqa: F401 - changes SGLang


class SteppedScheduler(scheduling.Scheduler):
    """A scheduler without connections to other processes.

    Methods with the prefix ``rlinf_`` do not exist in SGLang.
    """

    def __init__(self, arguments: Sequence[str], device: int) -> None:
        """
        Args:
            arguments: Command-line arguments.
            device: Index of the GPU; 0 on a CPU.

        Raises:
            RuntimeError: The weights of this model cannot be replaced.
        """
        settings = prepare_server_args([*arguments])
        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=device)
        publish(settings, role="scheduler", ranks=ranks)
        self.rlinf_requests: dict = {}  # type: ignore[type-arg]
        """Running requests by request id."""
        super().__init__(settings, SimpleNamespace(nccl_port=0))
        runner = self.tp_worker.model_runner
        self.model, self.rlinf_weight_updater = runner.model, runner.weight_updater
        if error := _unsupported_derived_weight_cache_error(self.model):
            raise RuntimeError(error)

    def init_ipc_channels(self, port_args) -> None:  # type: ignore[no-untyped-def]
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=SenderWrapper(None),
            send_to_detokenizer=SenderWrapper(None),
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = self.recv_from_tokenizer = None

    def _create_generation_req(self, recv_req, *args, **kwargs):  # type: ignore[no-untyped-def]
        request = super()._create_generation_req(recv_req, *args, **kwargs)
        self.rlinf_requests[recv_req.rid] = request
        return request

    def rlinf_submit(self, request_id: str, tokens: Sequence[int], settings: dict) -> None:  # type: ignore[type-arg]
        """Start decoding a request."""
        params = SamplingParams(**settings)
        params.normalize(self.tokenizer)
        params.verify(self.model_config.vocab_size)
        request = TokenizedGenerateReqInput(
            rid=request_id,
            input_text="",
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.process_input_requests([request])

    @DynamicGradMode()
    def step(self):  # type: ignore[no-untyped-def]
        """Compute one batch and return the requests that finished, by request id."""
        with self.device_module.StreamContext(self.schedule_stream):
            schedule = self.get_next_batch_to_run(
                running_batch=self.running_batch, last_batch=self.last_batch
            )
            self.running_batch, self.last_batch = schedule.running_batch, schedule.batch_to_run
            if self.last_batch:
                self.process_batch_result(self.last_batch, self.run_batch(self.last_batch))
            else:
                self._sched_idled = True
                self.new_token_ratio_tracker.reset()
        finished = {
            rid: request for rid, request in self.rlinf_requests.items() if request.finished()
        }
        for rid in finished:
            del self.rlinf_requests[rid]
        return finished

    def rlinf_abort_all(self) -> None:
        """Abort all requests. Running requests generate one more token while they end."""
        self.abort_request(AbortReq(rid="", abort_all=True))
        self._step_until_idle()
        self.rlinf_requests.clear()

    def _step_until_idle(self) -> None:
        """Step until the scheduler is idle, so that aborted and finished requests leave it."""
        while not self.is_fully_idle():
            self.step()

    @DynamicGradMode()
    def rlinf_load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights, by their names in checkpoints, into the model.

        Raises:
            RuntimeError: A parameter received no weights or NaN, or samples are running.
        """
        if self.rlinf_requests:
            raise RuntimeError("weights cannot be replaced while samples are running")
        self._step_until_idle()
        self.rlinf_weight_updater.begin_weight_update()
        parameters = {n: p for n, p in self.model.named_parameters() if p.is_floating_point()}
        # SGLang's models do not report which parameters received weights.
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        self.model.load_weights(tensors)
        empty = [name for name, parameter in parameters.items() if parameter.isnan().any()]
        if empty:
            raise RuntimeError(
                f"no complete weights for {empty[0]} and {len(empty) - 1} other parameters, or "
                "they are NaN"
            )
        self.rlinf_weight_updater.end_weight_update(run_post_load=False)
        self.device_module.synchronize()
        if not self.flush_cache():
            raise RuntimeError("SGLang cannot clear its cache")

    def rlinf_sleep(self, tags: list[str]) -> None:
        """Free device memory; weights move to host memory."""
        self._step_until_idle()
        self.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))

    def rlinf_wake(self, tags: list[str]) -> None:
        """Undo :meth:`rlinf_sleep`."""
        self.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    def rlinf_shut_down(self) -> None:
        """Free SGLang's process-wide state, so that another scheduler can be created."""
        self.release_host_resources()
        _destroy_state()


def create_scheduler(arguments: Sequence[str], device: int) -> SteppedScheduler:
    """Create the scheduler of this process; there can be only one at a time.

    Raises:
        RuntimeError: Another scheduler exists; or see :class:`SteppedScheduler`.
    """
    if bootstrap._PARALLEL_INITIALISED:
        raise RuntimeError("a process can run one SGLang at a time: close the other engine first")
    try:
        return SteppedScheduler(arguments, device)
    except BaseException:
        _destroy_state()
        raise


def _destroy_state() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    reset_context()


# The watchdog's thread would keep the model in memory and kill the parent process.
scheduling.create_scheduler_watchdog = lambda *args, **options: None
