"""The PyTorch door of fp8kit. So far: tensors as fp8kit's views and back, by pointer; the modules are not here yet."""

from fp8kit_torch.views import as_view, dtype_of, empty_like_metas

__all__ = ["as_view", "dtype_of", "empty_like_metas"]
