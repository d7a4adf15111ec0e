/* Operations on rows. All are bound by memory; each thread moves 16 bytes at a time, a row of a few
 * KiB is one warp's, a wider one a block's. */
#include "kernels/cuda/device.cuh"

/* Widest row of one warp: four pieces for each lane. */
enum { WARP_BYTES = 4 * 32 * 16 };

static bool is_narrow(int64_t cols, mz_dtype type) {
    return cols * (type == MZ_BF16 ? 2 : 4) <= WARP_BYTES;
}

static bool rows_aligned(const void *p, int64_t stride, mz_dtype type) {
    return p == NULL || (cu_aligned(p) && stride % (type == MZ_BF16 ? 8 : 4) == 0);
}

/* Launches kernel<T, THREADS> for the storage type and the width. */
#define LAUNCH_ROWS(kernel, d, stream, type, rows, cols, ...)                                      \
    ((type) == MZ_BF16                                                                             \
         ? (is_narrow(cols, type)                                                                  \
                ? CU_LAUNCH((kernel<uint16_t, 32>), cu_blocks(d, rows, CU_WARPS), CU_BLOCK, 0,     \
                            stream, __VA_ARGS__)                                                   \
                : CU_LAUNCH((kernel<uint16_t, CU_BLOCK>), cu_blocks(d, rows, 1), CU_BLOCK, 0,      \
                            stream, __VA_ARGS__))                                                  \
         : (is_narrow(cols, type) ? CU_LAUNCH((kernel<float, 32>), cu_blocks(d, rows, CU_WARPS),   \
                                              CU_BLOCK, 0, stream, __VA_ARGS__)                    \
                                  : CU_LAUNCH((kernel<float, CU_BLOCK>), cu_blocks(d, rows, 1),    \
                                              CU_BLOCK, 0, stream, __VA_ARGS__)))

/* This thread's first value of a row, and how far apart its pieces are. */
template <class T, int THREADS> __device__ static inline int64_t first_value() {
    return (int64_t)((int)threadIdx.x % THREADS) * cu_piece<T>::values;
}
template <class T, int THREADS> __device__ static inline int64_t value_step() {
    return (int64_t)THREADS * cu_piece<T>::values;
}

/* How many rows there are: *used, where given, may be fewer. */
__device__ static inline int64_t rows_there(int64_t rows, const int64_t *used) {
    return used && *used < rows ? *used : rows;
}

/* ---- conversion ---------------------------------------------------------------------------------
 */

/* Eight values a thread: 16 bytes of bf16, twice 16 of fp32. Bytes: 6 n, either way. */
__global__ static void __launch_bounds__(CU_BLOCK)
    widen_kernel(float *to, const uint16_t *from, int64_t n, bool aligned) {
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK * 8;
    for (int64_t i = ((int64_t)blockIdx.x * CU_BLOCK + threadIdx.x) * 8; i < n; i += step) {
        cu_piece<uint16_t> in;
        cu_read(&in, from, i, n, aligned);
        for (int half = 0; half < 2; half++) {
            cu_piece<float> out;
            for (int j = 0; j < 4; j++)
                out.at[j] = mz_from_bf16(in.at[4 * half + j]);
            cu_write(to, &out, i + 4 * half, n, aligned);
        }
    }
}

__global__ static void __launch_bounds__(CU_BLOCK)
    narrow_kernel(uint16_t *to, const float *from, int64_t n, bool aligned) {
    const int64_t step = (int64_t)gridDim.x * CU_BLOCK * 8;
    for (int64_t i = ((int64_t)blockIdx.x * CU_BLOCK + threadIdx.x) * 8; i < n; i += step) {
        cu_piece<uint16_t> out;
        for (int half = 0; half < 2; half++) {
            cu_piece<float> in;
            cu_read(&in, from, i + 4 * half, n, aligned);
            for (int j = 0; j < 4; j++)
                out.at[4 * half + j] = mz_to_bf16(in.at[j]);
        }
        cu_write(to, &out, i, n, aligned);
    }
}

extern "C" int mz_cuda_convert(const mz_cuda_device *d, void *stream, mz_dtype to_type, void *to,
                               mz_dtype from_type, const void *from, int64_t n) {
    if (to_type == from_type)
        return to == from ? 0
                          : (int)cudaMemcpyAsync(to, from, (size_t)n * (to_type == MZ_BF16 ? 2 : 4),
                                                 cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
    const bool aligned = cu_aligned(to) && cu_aligned(from);
    const unsigned blocks = cu_blocks(d, n, CU_BLOCK * 8);
    if (to_type == MZ_F32)
        return CU_LAUNCH(widen_kernel, blocks, CU_BLOCK, 0, stream, (float *)to,
                         (const uint16_t *)from, n, aligned);
    return CU_LAUNCH(narrow_kernel, blocks, CU_BLOCK, 0, stream, (uint16_t *)to,
                     (const float *)from, n, aligned);
}

/* ---- norms and dots -----------------------------------------------------------------------------
 */

/* b NULL: of a with itself. Bytes, s of a value: rows (2 cols s + 4), with itself rows (cols s +
 * 4); FLOPs: 2 rows cols. */
template <class T, int THREADS>
__global__ static void __launch_bounds__(CU_BLOCK) dots_kernel(mz_dots d, bool aligned) {
    for (int64_t i = cu_first_row<THREADS>(); i < d.rows; i += cu_row_step<THREADS>()) {
        const T *a = (const T *)d.a + i * d.a_stride;
        const T *b = d.b ? (const T *)d.b + i * d.b_stride : NULL;
        float sum = 0;
        for (int64_t at = first_value<T, THREADS>(); at < d.cols; at += value_step<T, THREADS>()) {
            cu_piece<T> x, y;
            cu_read(&x, a, at, d.cols, aligned);
            if (b)
                cu_read(&y, b, at, d.cols, aligned);
            for (int j = 0; j < cu_piece<T>::values; j++)
                sum += cu_widen(x.at[j]) * cu_widen(b ? y.at[j] : x.at[j]);
        }
        sum = cu_row_sum<THREADS>(sum);
        if (threadIdx.x % THREADS == 0)
            d.out[i] = sum;
    }
}

extern "C" int mz_cuda_row_dots(const mz_cuda_device *d, void *stream, const mz_dots *a) {
    const bool aligned =
        rows_aligned(a->a, a->a_stride, a->type) && rows_aligned(a->b, a->b_stride, a->type);
    return LAUNCH_ROWS(dots_kernel, d, stream, a->type, a->rows, a->cols, *a, aligned);
}

extern "C" int mz_cuda_row_norms(const mz_cuda_device *d, void *stream, const mz_norms *a) {
    const mz_dots dots = {a->type, a->x, NULL, a->rows, a->cols, a->stride, 0, a->out};
    return mz_cuda_row_dots(d, stream, &dots);
}

/* ---- pack, unpack, combine ----------------------------------------------------------------------
 */

/* Writes a row: zeros where `from` is NULL, a copy of the bits where `scale` is. */
template <class T, int THREADS>
__device__ static inline void write_row(T *to, const T *from, const float *scale, int64_t n,
                                        bool aligned) {
    for (int64_t at = first_value<T, THREADS>(); at < n; at += value_step<T, THREADS>()) {
        cu_piece<T> piece = {};
        if (from)
            cu_read(&piece, from, at, n, aligned);
        if (from && scale)
            for (int j = 0; j < cu_piece<T>::values; j++)
                cu_narrow(&piece.at[j], MZ_MUL(cu_widen(piece.at[j]), *scale));
        cu_write(to, &piece, at, n, aligned);
    }
}

/* Bytes: rows (2 H s + 8), and 4 where there are scales; rows of a token after its first come from
 * L2. */
template <class T, int THREADS>
__global__ static void __launch_bounds__(CU_BLOCK) pack_kernel(mz_pack p, bool aligned) {
    const int64_t rows = rows_there(p.rows, p.rows_used);
    for (int64_t i = cu_first_row<THREADS>(); i < rows; i += cu_row_step<THREADS>()) {
        const int64_t pair = p.row_pair[i];
        const T *from = NULL;
        if (pair >= 0)
            from = (const T *)p.x + (p.token ? p.token[pair] : pair / p.k) * p.hidden;
        write_row<T, THREADS>((T *)p.out + i * p.hidden, from,
                              p.scale && from ? p.scale + pair : NULL, p.hidden, aligned);
    }
}

extern "C" int mz_cuda_pack_rows(const mz_cuda_device *d, void *stream, const mz_pack *a) {
    const bool aligned =
        rows_aligned(a->x, a->hidden, a->type) && rows_aligned(a->out, a->hidden, a->type);
    return LAUNCH_ROWS(pack_kernel, d, stream, a->type, a->rows, a->hidden, *a, aligned);
}

/* Bytes: pairs (H s + 8) and rows H s. */
template <class T, int THREADS>
__global__ static void __launch_bounds__(CU_BLOCK) unpack_kernel(mz_unpack u, bool aligned) {
    for (int64_t pair = cu_first_row<THREADS>(); pair < u.pairs; pair += cu_row_step<THREADS>()) {
        const int64_t at = u.position[pair];
        write_row<T, THREADS>((T *)u.out + pair * u.hidden,
                              at < 0 ? NULL : (const T *)u.row + at * u.hidden, NULL, u.hidden,
                              aligned);
    }
}

extern "C" int mz_cuda_unpack_rows(const mz_cuda_device *d, void *stream, const mz_unpack *a) {
    const bool aligned =
        rows_aligned(a->row, a->hidden, a->type) && rows_aligned(a->out, a->hidden, a->type);
    return LAUNCH_ROWS(unpack_kernel, d, stream, a->type, a->pairs, a->hidden, *a, aligned);
}

/* Adds the rows of pairs [begin, end) at `at` to `sum`, in order and without contraction. */
template <class T>
__device__ static inline void add_rows(float sum[], const mz_combine &c, int64_t begin, int64_t end,
                                       int64_t at, bool aligned) {
    for (int64_t pair = begin; pair < end; pair++) {
        const int64_t row = c.position[pair];
        if (row < 0)
            continue;
        const float factor = c.scale ? c.scale[pair] : 1.0f;
        cu_piece<T> piece;
        cu_read(&piece, (const T *)c.row + row * c.hidden, at, c.hidden, aligned);
        for (int j = 0; j < cu_piece<T>::values; j++)
            sum[j] = MZ_ADD(sum[j], MZ_MUL(cu_widen(piece.at[j]), factor));
    }
}

/* Bytes: rows H s, tokens H s (twice where it accumulates), 12 a pair; FLOPs: 2 rows H. */
template <class T, int THREADS>
__global__ static void __launch_bounds__(CU_BLOCK) combine_kernel(mz_combine c, bool aligned) {
    for (int64_t t = cu_first_row<THREADS>(); t < c.tokens; t += cu_row_step<THREADS>()) {
        const int64_t begin = c.token_begin ? c.token_begin[t] : t * c.k;
        const int64_t end = c.token_begin ? c.token_begin[t + 1] : begin + c.k;
        T *to = (T *)c.out + t * c.hidden;
        for (int64_t at = first_value<T, THREADS>(); at < c.hidden;
             at += value_step<T, THREADS>()) {
            cu_piece<T> piece = {};
            if (c.accumulate)
                cu_read(&piece, to, at, c.hidden, aligned);
            float sum[cu_piece<T>::values];
            for (int j = 0; j < cu_piece<T>::values; j++)
                sum[j] = cu_widen(piece.at[j]);
            add_rows<T>(sum, c, begin, end, at, aligned);
            for (int j = 0; j < cu_piece<T>::values; j++)
                cu_narrow(&piece.at[j], sum[j]);
            cu_write(to, &piece, at, c.hidden, aligned);
        }
    }
}

extern "C" int mz_cuda_combine_rows(const mz_cuda_device *d, void *stream, const mz_combine *a) {
    const bool aligned =
        rows_aligned(a->row, a->hidden, a->type) && rows_aligned(a->out, a->hidden, a->type);
    return LAUNCH_ROWS(combine_kernel, d, stream, a->type, a->tokens, a->hidden, *a, aligned);
}

/* ---- SwiGLU -------------------------------------------------------------------------------------
 */

/* Bytes: rows (3 I s + 4); FLOPs: some 10 a value of h, an exponential and a division among them.
 */
template <class T, int THREADS>
__global__ static void __launch_bounds__(CU_BLOCK) swiglu_kernel(mz_swiglu s, bool aligned) {
    const int64_t rows = rows_there(s.rows, s.rows_used), n = s.intermediate;
    for (int64_t i = cu_first_row<THREADS>(); i < rows; i += cu_row_step<THREADS>()) {
        const T *gate = (const T *)s.gate_up + 2 * i * n;
        float sum = 0;
        for (int64_t at = first_value<T, THREADS>(); at < n; at += value_step<T, THREADS>()) {
            cu_piece<T> u, v, h;
            cu_read(&u, gate, at, n, aligned);
            cu_read(&v, gate + n, at, n, aligned);
            for (int j = 0; j < cu_piece<T>::values; j++) {
                cu_narrow(&h.at[j], mz_silu(cu_widen(u.at[j])) * cu_widen(v.at[j]));
                sum += cu_widen(h.at[j]) * cu_widen(h.at[j]);
            }
            cu_write((T *)s.h + i * n, &h, at, n, aligned);
        }
        if (!s.norm2)
            continue;
        sum = cu_row_sum<THREADS>(sum);
        if (threadIdx.x % THREADS == 0)
            s.norm2[i] = sum;
    }
}

static bool swiglu_aligned(const mz_swiglu *a) {
    const int64_t n = a->intermediate;
    return rows_aligned(a->gate_up, n, a->type) && rows_aligned(a->h, n, a->type) &&
           rows_aligned(a->dh, n, a->type) && rows_aligned(a->dgate_up, n, a->type);
}

extern "C" int mz_cuda_swiglu_forward(const mz_cuda_device *d, void *stream, const mz_swiglu *a) {
    return LAUNCH_ROWS(swiglu_kernel, d, stream, a->type, a->rows, a->intermediate, *a,
                       swiglu_aligned(a));
}

/* One piece of the backward pass: u and v become du and dv, h is silu(u) v; the piece's part of
 * <dh, h>. */
template <class T>
__device__ static inline float swiglu_back(cu_piece<T> *u, cu_piece<T> *v, cu_piece<T> *h,
                                           const cu_piece<T> &dh, float factor) {
    float sum = 0;
    for (int j = 0; j < cu_piece<T>::values; j++) {
        const float gate = cu_widen(u->at[j]), up = cu_widen(v->at[j]), d = cu_widen(dh.at[j]);
        const float scaled = d * factor, silu = mz_silu(gate), out = silu * up;
        sum += d * out;
        cu_narrow(&u->at[j], scaled * up * mz_silu_slope(gate));
        cu_narrow(&v->at[j], scaled * silu);
        cu_narrow(&h->at[j], out);
    }
    return sum;
}

/* Bytes: rows (5 I s + 8), 6 I s where h is written again; FLOPs: some 20 a value of h. */
template <class T, int THREADS>
__global__ static void __launch_bounds__(CU_BLOCK, 3)
    swiglu_back_kernel(mz_swiglu s, bool aligned) {
    const int64_t rows = rows_there(s.rows, s.rows_used), n = s.intermediate;
    for (int64_t i = cu_first_row<THREADS>(); i < rows; i += cu_row_step<THREADS>()) {
        const T *gate = (const T *)s.gate_up + 2 * i * n;
        T *dgate = (T *)s.dgate_up + 2 * i * n; /* may be `gate` */
        const float factor = s.scale ? s.scale[i] : 1.0f;
        float sum = 0;
        for (int64_t at = first_value<T, THREADS>(); at < n; at += value_step<T, THREADS>()) {
            cu_piece<T> u, v, h, dh;
            cu_read(&u, gate, at, n, aligned);
            cu_read(&v, gate + n, at, n, aligned);
            cu_read(&dh, (const T *)s.dh + i * n, at, n, aligned);
            sum += swiglu_back(&u, &v, &h, dh, factor);
            cu_write(dgate, &u, at, n, aligned);
            cu_write(dgate + n, &v, at, n, aligned);
            if (s.h)
                cu_write((T *)s.h + i * n, &h, at, n, aligned);
        }
        if (!s.dot)
            continue;
        sum = cu_row_sum<THREADS>(sum);
        if (threadIdx.x % THREADS == 0)
            s.dot[i] = sum;
    }
}

extern "C" int mz_cuda_swiglu_backward(const mz_cuda_device *d, void *stream, const mz_swiglu *a) {
    return LAUNCH_ROWS(swiglu_back_kernel, d, stream, a->type, a->rows, a->intermediate, *a,
                       swiglu_aligned(a));
}
