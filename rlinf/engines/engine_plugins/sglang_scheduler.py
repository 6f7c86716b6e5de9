"""SGLang's scheduler without the processes around it: its caller steps it, and reads its requests.

Imported where SGLang is in the process of the stage; torch and SGLang, nothing else. What is
changed in SGLang for its server is changed here as well (:mod:`rlinf.engines.engine_plugins.rlinf_sglang`).
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
    """With nobody to talk to."""

    def __init__(self, words: Sequence[str], device: int) -> None:
        """
        Args:
            words: of the command line.
            device: number of the GPU; 0 on a CPU.

        Raises:
            RuntimeError: weights of the network cannot be replaced.
        """
        settings = prepare_server_args([*words])
        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=device)
        publish(settings, role="scheduler", ranks=ranks)
        self.rlinf_requests: dict = {}  # type: ignore[type-arg]
        """Requests under way, by name."""
        super().__init__(settings, SimpleNamespace(nccl_port=0))
        runner = self.tp_worker.model_runner
        self.model, self.updater = runner.model, runner.weight_updater
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

    def rlinf_submit(self, name: str, tokens: Sequence[int], settings: dict) -> None:  # type: ignore[type-arg]
        """Have a request decoded."""
        params = SamplingParams(**settings)
        params.normalize(self.tokenizer)
        params.verify(self.model_config.vocab_size)
        asked = TokenizedGenerateReqInput(
            rid=name,
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
        self.process_input_requests([asked])

    @DynamicGradMode()
    def step(self):  # type: ignore[no-untyped-def]
        """Compute one batch; returns the requests that came to an end, by name."""
        with self.device_module.StreamContext(self.schedule_stream):
            plan = self.get_next_batch_to_run(
                running_batch=self.running_batch, last_batch=self.last_batch
            )
            self.running_batch, self.last_batch = plan.running_batch, plan.batch_to_run
            if self.last_batch:
                self.process_batch_result(self.last_batch, self.run_batch(self.last_batch))
            else:
                self._sched_idled = True
                self.new_token_ratio_tracker.reset()
        ended = {
            name: request for name, request in self.rlinf_requests.items() if request.finished()
        }
        for name in ended:
            del self.rlinf_requests[name]
        return ended

    def rlinf_abort_all(self) -> None:
        """End all that is under way. What has begun takes one more token as it ends."""
        self.abort_request(AbortReq(rid="", abort_all=True))
        self._settle()
        self.rlinf_requests.clear()

    def _settle(self) -> None:
        """What was ended is through with a last step, and what came to its end leaves with it."""
        while not self.is_fully_idle():
            self.step()

    @DynamicGradMode()
    def rlinf_load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have weights, by their names in checkpoints, in the memory of the model.

        Raises:
            RuntimeError: some of the memory got none, which the models of SGLang do not say, or got
                what is no number; or samples are under way.
        """
        if self.rlinf_requests:
            raise RuntimeError("samples are under way")
        self._settle()
        self.updater.begin_weight_update()
        parameters = {n: p for n, p in self.model.named_parameters() if p.is_floating_point()}
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        self.model.load_weights(tensors)
        empty = [name for name, parameter in parameters.items() if parameter.isnan().any()]
        if empty:
            raise RuntimeError(
                f"no weights came for all of {empty[0]} and {len(empty) - 1} others, or they are "
                "no numbers"
            )
        self.updater.end_weight_update(run_post_load=False)
        self.device_module.synchronize()
        if not self.flush_cache():
            raise RuntimeError("SGLang keeps what it has cached")

    def rlinf_sleep(self, parts: list[str]) -> None:
        """Let go of the device's memory; weights stay in the host's."""
        self._settle()
        self.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=parts))

    def rlinf_wake(self, parts: list[str]) -> None:
        """Undo :meth:`rest`."""
        self.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=parts))

    def rlinf_shut_down(self) -> None:
        """Free what SGLang keeps for the whole process, so that another scheduler can be made."""
        self.release_host_resources()
        _take_down()


def create_scheduler(words: Sequence[str], device: int) -> SteppedScheduler:
    """A scheduler; see :class:`SteppedScheduler`. A process holds one at a time.

    Raises:
        RuntimeError: another one was not ended; or see there.
    """
    if bootstrap._PARALLEL_INITIALISED:
        raise RuntimeError("a process holds one SGLang at a time: close the other engine first")
    try:
        return SteppedScheduler(words, device)
    except BaseException:
        _take_down()
        raise


def _take_down() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    reset_context()


# Its thread would keep the model, and end the process that started this one.
scheduling.create_scheduler_watchdog = lambda *args, **options: None
