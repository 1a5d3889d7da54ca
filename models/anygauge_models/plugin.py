"""The model families of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl

if TYPE_CHECKING:
    from anygauge_hooks.models import ModelSpec


@hookimpl
def register_models() -> list[ModelSpec]:
    """Return the families, without importing torch."""
    from anygauge_models.deepseek_v3 import DEEPSEEK_V3
    from anygauge_models.gemma3 import GEMMA3
    from anygauge_models.gemma3_multimodal import GEMMA3_MULTIMODAL
    from anygauge_models.glm4 import GLM4
    from anygauge_models.glm4_moe import GLM4_MOE
    from anygauge_models.glm4_moe_lite import GLM4_MOE_LITE
    from anygauge_models.glm4v.spec import GLM4V, GLM46V
    from anygauge_models.glm4v_moe import GLM4V_MOE
    from anygauge_models.glm_omni.spec import GLM_OMNI
    from anygauge_models.gpt_oss import GPT_OSS
    from anygauge_models.llama import LLAMA
    from anygauge_models.mimo import MIMO
    from anygauge_models.mistral import MISTRAL
    from anygauge_models.olmo import OLMO2, OLMO3
    from anygauge_models.phi3 import PHI3
    from anygauge_models.qwen2 import QWEN2
    from anygauge_models.qwen2_5_vl.spec import QWEN2_5_VL
    from anygauge_models.qwen3 import QWEN3
    from anygauge_models.qwen3_5.spec import QWEN3_5
    from anygauge_models.qwen3_5_moe import QWEN3_5_MOE
    from anygauge_models.qwen3_moe import QWEN3_MOE
    from anygauge_models.qwen3_next import QWEN3_NEXT
    from anygauge_models.qwen3_omni_moe.spec import QWEN3_OMNI_MOE
    from anygauge_models.qwen3_vl.spec import QWEN3_VL
    from anygauge_models.qwen3_vl_moe import QWEN3_VL_MOE
    from anygauge_models.seed_oss import SEED_OSS
    from anygauge_models.smollm3 import SMOLLM3

    glm = [GLM4, GLM4_MOE, GLM4_MOE_LITE, GLM4V, GLM4V_MOE, GLM46V, GLM_OMNI]
    qwen = [QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT]
    qwen_media = [QWEN2_5_VL, QWEN3_OMNI_MOE, QWEN3_VL, QWEN3_VL_MOE]
    dense = [LLAMA, MIMO, MISTRAL, OLMO2, OLMO3, PHI3, SEED_OSS, SMOLLM3]
    return [DEEPSEEK_V3, GEMMA3, GEMMA3_MULTIMODAL, GPT_OSS, *dense, *glm, *qwen, *qwen_media]
