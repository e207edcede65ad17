"""Configurations of Transformer Engine's debug features, as users write them."""

# the examples of Transformer Engine's features, as its documentation has them
EXAMPLES = {
    "LogTensorStats": """
example_tensor_stat_collection:
    enabled: True
    layers:
        layer_name_regex_pattern: .*(fc1|self_attention).*
    transformer_engine:
        LogTensorStats:
            enabled: True
            tensors_struct:
                - tensor: activation
                  stats: [mean]
                  freq: 10
                  start_step: 5
                  end_step: 100
                - tensor: gradient
                  stats: [mean, max, min]
                  freq: 2
                  start_end_list: [[0, 20], [80, 100]]
                - tensor: weight
                  stats: [dynamic_range]
""",
    "LogFp8TensorStats": """
example_fp8_tensor_stat_collection:
    enabled: True
    layers:
        layer_types: [layernorm_qkv]
    transformer_engine:
        LogFp8TensorStats:
            enabled: True
            tensors_struct:
            - tensor: activation
              stats: [underflows%, mxfp8_mse]
              freq: 1
            - tensor: gradient
              stats: [underflows%]
              freq: 5
              start_step: 0
              end_step: 80
            - tensor: weight
              stats: [scale_inv_min, fp8_block_scaling_underflows%_columnwise]
""",
    "LogNvfp4TensorStats": """
example_nvfp4_tensor_stat_collection:
    enabled: True
    layers:
        layer_types: [layernorm_qkv]
    transformer_engine:
        LogNvfp4TensorStats:
            enabled: True
            tensors_struct:
            - tensor: activation
              stats: [underflows%, mse]
              freq: 1
            - tensor: gradient
              stats: [underflows%, mse]
              freq: 5
              start_step: 0
              end_step: 80
""",
    "FakeQuant": """
example_fake_quant_fp8:
    enabled: True
    layers:
        layer_types: [layernorm_mlp.fc1]
    transformer_engine:
        FakeQuant:
            enabled: True
            quant_format: FP8E5M2
            gemms_struct:
            - gemm: fprop
              tensors: [activation, weight]
            - gemm: dgrad
              tensors: [gradient]
""",
    "PerTensorScaling": """
example_per_tensor_scaling:
    enabled: True
    layers:
        layer_types: [self_attention.layernorm_qkv]
    transformer_engine:
        PerTensorScaling:
            enabled: True
            gemms: [dgrad]
            tensors: [weight, activation]
""",
    "Disable": """
section1:
  enabled: True
  layers:
    layer_types: [self_attention]
  transformer_engine:
    DisableFP8GEMM:
      enabled: True
      gemms: [wgrad]
section2:
  enabled: True
  layers:
    layer_types: [fc2]
  transformer_engine:
    DisableFP8Layer:
      enabled: True
section3:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [min]
      tensors: [wgrad]
      freq: 1
      start_step: 0
      end_step: 50
""",
    "DumpTensors": """
dump_tensors_example:
    enabled: True
    layers:
        layer_name_regex_pattern: .*(fc1|self_attention).*
    transformer_engine:
        DumpTensors:
            enabled: True
            tensors_struct:
                - tensor: activation
                  high_precision_tensor: True
                  quantized_tensor: True
                  freq: 100
                - tensor: weight
                  high_precision_tensor: True
                  quantized_tensor: False
                  freq: 500
""",
    "A16": """
any_section_name:
  enabled: True
  layers: {layer_name_regex_pattern: ".*(fc1|fc2)"}
  transformer_engine:
    LogFp8TensorStats:
      {enabled: True, tensors_struct: [{tensor: activation, stats: [underflows%, mxfp8_mse], freq: 10}]}
    LogTensorStats:
      enabled: True
      tensors: [activation]
      stats: [{max_blockwise_dynamic_range: {block_size: 32, dims: 1}}]
    DisableQuantizationGEMM: {enabled: True, gemms: [wgrad]}
""",
}
