"""Megatron-Core on this frontend: the names that it and NeMo import, and a transformer layer of its own
Transformer Engine spec."""

import ast
import importlib
import importlib.util
import os
import tempfile
from pathlib import Path

import fp8kit_torch

te = fp8kit_torch.as_transformer_engine().pytorch

import torch

from tests.clients.programs.checks import main

NAMES = {
    "pytorch": "Linear LayerNormLinear GroupedLinear DotProductAttention LayerNorm RMSNorm Fp8Padding"
    " Fp8Unpadding ops quantized_model_init is_mxfp8_available is_nvfp4_available",
    "pytorch.fp8": "FP8GlobalStateManager fp8_autocast fp8_model_init",
    "pytorch.quantization": "FP8GlobalStateManager",
    "pytorch.router": "fused_topk_with_score_function fused_compute_score_for_moe_aux_loss"
    " fused_moe_aux_loss",
    "pytorch.permutation": "moe_permute moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute"
    " moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs",
    "pytorch.cross_entropy": "parallel_cross_entropy",
    "pytorch.attention.rope": "apply_rotary_pos_emb apply_fused_qkv_rotary_pos_emb",
    "pytorch.distributed": "checkpoint CudaRNGStatesTracker activation_recompute_forward get_all_rng_states"
    " is_fp8_activation_recompute_enabled",
    "pytorch.graph": "set_capture_start set_capture_end",
    "pytorch.optimizers": "FusedAdam FusedSGD multi_tensor_applier multi_tensor_scale multi_tensor_l2norm",
    "pytorch.tensor": "QuantizedTensor MXFP8TensorStorage NVFP4TensorStorage",
    "pytorch.tensor.utils": "cast_master_weights_to_fp8 quantize_master_weights replace_raw_data"
    " post_all_gather_processing",
    "pytorch.tensor.grouped_tensor": "GroupedTensor",
    "pytorch.module.base": "TransformerEngineBaseModule get_dummy_wgrad get_workspace",
    "pytorch.cpu_offload": "get_cpu_offload_context",
    "common.recipe": "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling Format",
}


def check_names_resolve():
    for module, names in NAMES.items():
        found = importlib.import_module(f"transformer_engine.{module}")
        for name in names.split():
            assert getattr(found, name) is not None, (module, name)
    import transformer_engine_torch

    assert transformer_engine_torch.DType is not None


# names that Megatron-Core tries for Transformer Engine of before 2, and what it would replace in modules that
# import it; both behind a check
OTHERS = {
    "transformer_engine.pytorch.attention._SplitAlongDim",
    "transformer_engine.pytorch.attention._SplitAlongDim.apply",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
    "transformer_engine.pytorch.float8_tensor.Float8Tensor.make_like",
    "transformer_engine.pytorch.module.layernorm_linear.general_gemm",
    "transformer_engine.pytorch.module.linear.general_gemm",
}


def named(source):
    """Every name of Transformer Engine that a module's source imports, or reads as an attribute."""
    found, local = set(), {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_engine"):
            for name in node.names:
                local[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("transformer_engine"):
                    top = name.name.partition(".")[0]
                    local[name.asname or top] = name.name if name.asname else top
    found |= set(local.values())

    def dotted(node):
        if isinstance(node, ast.Attribute):
            above = dotted(node.value)
            return above and f"{above}.{node.attr}"
        return local.get(node.id) if isinstance(node, ast.Name) else None

    return found | {
        name for node in ast.walk(source) if isinstance(node, ast.Attribute) and (name := dotted(node))
    }


def resolves(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def check_every_name_in_its_source_resolves():
    (root,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    names = set().union(*(named(ast.parse(path.read_text())) for path in Path(root).rglob("*.py")))
    assert len(names) > 80, len(names)
    assert {name for name in names if not resolves(name)} <= OTHERS


def layer():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        perform_initialization=True,
        bf16=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    torch.manual_seed(0)
    return build_module(spec, config=config, layer_number=1)


def check_a_transformer_layer_trains():
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        made = layer()
        kinds = (te.LayerNormLinear, te.DotProductAttention, te.Linear)
        assert [sum(isinstance(part, kind) for part in made.modules()) for kind in kinds] == [2, 1, 2]
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        x, losses = torch.randn(16, 2, 64), []
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        for recipe in (None, te.Float8CurrentScaling()):
            for _ in range(3):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    y, _ = made(hidden_states=x, attention_mask=mask)
                loss = (y - x.flip(0)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[2] < losses[0], losses
        assert losses[5] < losses[2], losses
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    main(globals())
