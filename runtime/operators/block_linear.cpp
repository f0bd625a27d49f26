#include "operator.h"
namespace specexport {
void define_block_linear(Operator& op) { op.name = "BlockLinear"; op.make = nullptr; op.run = nullptr; op.num_inputs = 0; op.num_outputs = 0; }
void define_block_embedding(Operator& op) { op.name = "BlockEmbedding"; }
}
