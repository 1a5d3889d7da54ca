"""Linears under the names and with the arguments of MindSpeed's. Simulated: Megatron's own compute."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class _Marked:
    """Has extra state, and marks the weight as split otherwise than it is."""

    def _mark(self) -> None:
        vars(self.weight).update(tensor_model_parallel=False, partition_dim=-1)

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: Any) -> None:
        pass


class TEColumnParallelLinear(_Marked, ColumnParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        tp_group: Any = None,
    ) -> None:
        ColumnParallelLinear.__init__(
            self,
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            gather_output=gather_output,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
        )
        self._mark()


class TERowParallelLinear(_Marked, RowParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        tp_group: Any = None,
    ) -> None:
        RowParallelLinear.__init__(
            self,
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
        )
        self._mark()
