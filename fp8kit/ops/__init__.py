"""Operations: differentiable units written once on top of the kernels, for every frontend.

======================  ===========================================================  =====================
operation               what it computes                                             file
======================  ===========================================================  =====================
linear, weight_cast     y = x W^T + b; the FP8 weight alone                          linear.py, product.py
grouped_linear          groups of rows, each times a weight of its own               grouped_linear.py
expert_linear           likewise, the groups' sizes on the device                    expert_linear.py
expert_weight_cast      its FP8 weight alone                                         expert_linear.py
norm                    LayerNorm, RMSNorm, L2 normalisation                         norm.py
norm_linear             y = norm(x) W^T + b, the residual stream going through       norm_linear.py
norm_mlp                y = act(norm(x) W1^T + b1) W2^T + b2, likewise; smoothed     norm_mlp.py, smooth.py
attention               scaled dot product attention                                 attention.py
cached_attention        attention over a cache of keys and values, which it extends  kv_cache.py
rope                    rotary position embedding                                    rope.py
dropout_add, add        residual + dropout(x + bias); a + b                          dropout_add.py
drop_path               residual + x, whole samples of x dropped                     drop_path.py
split_heads             packed queries, keys and values, each by itself              split_heads.py
router, moe_aux_loss    which experts a token goes to; the loss of their balance     router.py
expert_rows             the map of tokens to rows by expert                          permute.py
scaled_activation       an activation's rows times their probabilities               scaled_activation.py
permute, unpermute      tokens to rows by expert, and sums of each token's rows      permute.py
embedding               rows of a table                                              embedding.py
activation              gelu, silu, swiglu... alone                                  activation.py
quantize, dequantize    casts to FP8 codes and back                                  casts.py
fp8_gemm                the product of two matrices of FP8 codes                     fp8_gemm.py
cross_entropy           softmax cross entropy                                        cross_entropy.py
line_scales             largest magnitudes of rows or columns                        scale_lines.py
scale_lines             rows, columns or all scaled, forward and backward apart      scale_lines.py
statistics              counts and sums of a tensor, its casts and its blocks        statistics.py
======================  ===========================================================  =====================
"""
