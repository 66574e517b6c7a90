#include "core.h"
#include "sampling.h"

#define SPACE avx512
#define TARGET TARGET_AVX512
#define WIDTH 16
#define ROWS_F32 12
#define ROWS_BF16 8
#include "vectors.h"
#include "vectors_attention.h"
#include "vectors_elements.h"
#include "vectors_recurrent.h"
#include "vectors_rounded.h"
#include "vectors_sampling.h"
