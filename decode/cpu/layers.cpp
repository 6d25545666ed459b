// Decoder layers one after the other, without Python in between. Their kernel is a library that AOTInductor compiled; it
// calls the project's ops by the C functions at the end of `linear.cpp` and `attention.cpp`.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "shim.h"

namespace {

using namespace draftless;

// AOTInductorModelContainerRun. Takes the inputs' handles over, and gives those of the outputs away.
typedef int32_t (*Run)(void* container, AtenTensorHandle* inputs, size_t inputs_count, AtenTensorHandle* outputs,
                       size_t outputs_count, void* stream, void* proxy_executor);

// weights: of each layer, one layer after the other. inputs: those of the first layer, states first; the others get
// what the layer before them returned. stored: the keys and the values of each layer. Returns the last layer's outputs.
std::vector<Tensor> run_layers(int64_t run, int64_t container, int64_t outputs, std::vector<Tensor> weights,
                               std::vector<Tensor> inputs, std::vector<Tensor> stored) {
  const size_t layers = stored.size() / 2, count = weights.size() / layers;
  std::vector<AtenTensorHandle> handles, returned(outputs);
  std::vector<Tensor> results;
  for (size_t layer = 0; layer < layers; ++layer) {
    handles.clear();
    for (size_t i = 0; i < count; ++i) handles.push_back(lend(weights[layer * count + i]));
    for (const Tensor& input : inputs) handles.push_back(lend(input));
    for (size_t i = 0; i < 2; ++i) handles.push_back(lend(stored[2 * layer + i]));
    failure.clear();
    const bool has_failed = ((Run)run)((void*)container, handles.data(), handles.size(), returned.data(), outputs,
                                       nullptr, nullptr);
    STD_TORCH_CHECK(!has_failed, "the kernel of a layer failed: ", failure);
    results = std::vector<Tensor>(returned.begin(), returned.end());
    inputs[0] = results[0];
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(draftless, m) {
  m.def(
      "run_layers(int run, int container, int outputs, Tensor[] weights, Tensor[] inputs, Tensor[] stored) "
      "-> Tensor[]");
}
STABLE_TORCH_LIBRARY_IMPL(draftless, CompositeExplicitAutograd, m) { m.impl("run_layers", TORCH_BOX(&run_layers)); }
