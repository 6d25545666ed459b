// Tensors as torch's C functions take them.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

namespace draftless {

using torch::stable::Tensor;

// A handle of its own for who takes a tensor over.
inline AtenTensorHandle lend(const Tensor& tensor) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return handle;
}

inline Tensor borrow(AtenTensorHandle handle) {
  AtenTensorHandle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  return Tensor(own);
}

// The tensor, or a copy. Torch's function asks the dispatcher even where there is nothing to do.
inline Tensor make_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A contiguous tensor of another's dtype and device. It does without torch's dispatcher, unlike torch's own function.
inline Tensor make_empty(const Tensor& like, const std::vector<int64_t>& shape) {
  int32_t dtype, device, index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), dtype, device, index, &handle));
  return Tensor(handle);
}

inline thread_local std::string failure;  // why an op that a kernel called has failed

// What a kernel's call of an op returns: 0, and the op's result, or 1 if it raised.
template <class Op>
AOTITorchError answer(AtenTensorHandle* result, Op op) {
  try {
    *result = lend(op());
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    failure = error.what();
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace draftless
