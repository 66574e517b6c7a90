#include "core.h"
#include "sampling.h"

#define SPACE avx2
#define TARGET TARGET_AVX2
#define WIDTH 8
#define ROWS_F32 3
#define ROWS_BF16 2
#include "vectors.h"
#include "vectors_attention.h"
#include "vectors_elements.h"
#include "vectors_recurrent.h"
#include "vectors_rounded.h"
#include "vectors_sampling.h"
