/* Kernels of the search for nearest centroids and of the sums. Without them `_search.py` and `_update.py` come to the same
 * codes and sums; they are here because torch and numpy pass several times over what one pass can do.
 *
 *   ss_pack, ss_search   scores in bfloat16 on tiles, all centroids that could be the nearest, and the nearest of them
 *   ss_scan, ss_settle   the same in two parts, for scores that come from elsewhere
 *   ss_move              rows from one centroid's sum to another's, on the grid where sums are exact
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#else
#define TILES 0
#endif

#define CAPACITY 24           /* candidates kept for a row; one that has more is settled among all centroids */
#define PANEL 512             /* centroids scored at a time */
#define STRIP 256             /* rows scored at a time */
#define STRIDE (STRIP + 16)   /* of scores; a power of two would hit few lines of the cache */
#define FEW 8                 /* centroids whose least score is kept, so that few scores are read again */

typedef struct { /* what is known of a row while panels pass */
    float upper; /* bound of its smallest true score */
    int32_t count, index[CAPACITY];
    float lower[CAPACITY]; /* bound of the candidate's true score */
} Row;

static void add_candidate(Row *row, int64_t k, float lower) {
    if (row->count < CAPACITY) {
        row->index[row->count] = (int32_t)k;
        row->lower[row->count] = lower;
    }
    row->count++;
}

/* Products are exact in float64, and are added in an order that does not hang on the compiler. */
static double exact_score(const float *row, const float *centroid, double half, int64_t dim) {
    double sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= dim; i += 8)
        for (int l = 0; l < 8; l++) sum[l] += (double)row[i + l] * (double)centroid[i + l];
    for (int l = 0; i < dim; i++, l++) sum[l] += (double)row[i] * (double)centroid[i];
    double low = (sum[0] + sum[4]) + (sum[2] + sum[6]), high = (sum[1] + sum[5]) + (sum[3] + sum[7]);
    return half - (low + high);
}

/* The nearest centroid: the only candidate, or the one of least exact score, the first of equals. */
static int32_t nearest(const Row *known, const float *row, int64_t dim, const float *table, int64_t n_centroids,
                       const double *half) {
    int32_t kept[CAPACITY], n_kept = 0;
    if (known->count <= CAPACITY)
        for (int32_t j = 0; j < known->count; j++)
            if (known->lower[j] <= known->upper) kept[n_kept++] = known->index[j];
    if (n_kept == 1) return kept[0];
    int64_t n_tries = n_kept ? n_kept : n_centroids;
    int32_t code = -1;
    double best = 0.0;
    for (int64_t j = 0; j < n_tries; j++) {
        int32_t k = n_kept ? kept[j] : (int32_t)j;
        double score = exact_score(row, table + k * dim, half[k], dim);
        if (code < 0 || score < best) best = score, code = k;
    }
    return code;
}

int64_t ss_row_bytes(void) { return sizeof(Row); }

/* Scores (n, width) of a panel, each off by at most slack[row]; `known` is zero before the first panel. */
void ss_scan(const float *scores, int64_t n, int64_t width, int64_t base, const float *slack, Row *known) {
    for (int64_t r = 0; r < n; r++) {
        const float *row = scores + r * width;
        float least[16];
        int64_t j = 0;
        for (int l = 0; l < 16; l++) least[l] = INFINITY;
        for (; j + 16 <= width; j += 16)
            for (int l = 0; l < 16; l++) least[l] = row[j + l] < least[l] ? row[j + l] : least[l];
        for (int l = 0; j < width; j++, l++) least[l] = row[j] < least[l] ? row[j] : least[l];
        for (int l = 1; l < 16; l++) least[0] = least[l] < least[0] ? least[l] : least[0];
        float bound = least[0] + slack[r];
        if (base == 0 || bound < known[r].upper) known[r].upper = bound;
        float limit = known[r].upper + slack[r];
        if (least[0] > limit) continue;
        for (j = 0; j + 16 <= width; j += 16) {
            uint32_t bits = 0;
            for (int l = 0; l < 16; l++) bits |= (uint32_t)(row[j + l] <= limit) << l;
            for (; bits; bits &= bits - 1) {
                int64_t k = j + __builtin_ctz(bits);
                add_candidate(known + r, base + k, row[k] - slack[r]);
            }
        }
        for (; j < width; j++)
            if (row[j] <= limit) add_candidate(known + r, base + j, row[j] - slack[r]);
    }
}

/* Codes of rows after all panels; `half` is infinite for centroids that are not to be chosen. */
void ss_settle(const float *rows, int64_t n, int64_t dim, const float *table, int64_t n_centroids, const double *half,
               const Row *known, int32_t *codes) {
    for (int64_t r = 0; r < n; r++) codes[r] = nearest(known + r, rows + r * dim, dim, table, n_centroids, half);
}

/* Take rows out of the sums of their old codes (-1: none) and add them to those of their new ones. */
int64_t ss_move(const float *rows, int64_t n, int64_t dim, const int32_t *old, const int32_t *fresh,
                const double *weights, double term, double *sums) {
    int64_t n_moved = 0;
    for (int64_t r = 0; r < n; r++) {
        if (old[r] == fresh[r]) continue;
        n_moved++;
        const float *row = rows + r * dim;
        double mass = weights ? weights[r] : 1.0, *to = sums + fresh[r] * dim, *from = sums + old[r] * dim;
        if (old[r] < 0)
            for (int64_t i = 0; i < dim; i++) to[i] += ((double)row[i] * mass + term) - term;
        else
            for (int64_t i = 0; i < dim; i++) {
                double value = ((double)row[i] * mass + term) - term;
                to[i] += value;
                from[i] -= value;
            }
    }
    return n_moved;
}

/* Whether this processor multiplies tiles of bfloat16, and the system lets us. */
int32_t ss_has_tiles(void) {
#if TILES
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}

#if TILES
/* Squares below 2^-149 are lost, so a length misses up to sqrt(dim) times 2^-74, and the tiles take denormal numbers as 0. */
#define VANISHED 0x1p-64f

/* 32 columns of a row in bfloat16; adds to what is kept, squared, and to what is left out, squared. */
static __m512i narrow(const float *from, int64_t width, __m512 *whole, __m512 *left) {
    __m512i out = _mm512_setzero_si512();
    for (int h = 0; h < 2; h++) {
        int64_t n = width - 16 * h;
        __mmask16 mask = n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
        __m512 value = _mm512_maskz_loadu_ps(mask, from + 16 * h);
        __m256i half = (__m256i)_mm512_cvtneps_pbh(value);
        __m512 kept = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        __m512 gap = _mm512_sub_ps(value, kept);
        *whole = _mm512_fmadd_ps(kept, kept, *whole);
        *left = _mm512_fmadd_ps(gap, gap, *left);
        out = h ? _mm512_inserti64x4(out, half, 1) : _mm512_castsi256_si512(half);
    }
    return out;
}

static void transpose(__m512i *m) { /* 16 x 16 of 32 bits */
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            m[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            m[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(m[j], m[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(m[j], m[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        m[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        m[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
        m[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
        m[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
    }
}

/* Rows in tiles of 32 columns x 16 rows, two columns side by side; norms are |kept| and |left out|. */
static void halve(const float *rows, int64_t n, int64_t dim, int64_t n_steps, uint16_t *out, float (*norms)[2]) {
    for (int64_t tile = 0; tile < (n + 31) / 32 * 2; tile++) {
        int64_t here = n - tile * 16 < 16 ? n - tile * 16 : 16;
        __m512 whole[16], left[16];
        for (int r = 0; r < 16; r++) whole[r] = left[r] = _mm512_setzero_ps();
        for (int64_t step = 0; step < n_steps; step++) {
            __m512i pairs[16];
            for (int64_t r = 0; r < 16; r++)
                pairs[r] = r < here ? narrow(rows + (tile * 16 + r) * dim + step * 32, dim - step * 32, whole + r, left + r)
                                    : _mm512_setzero_si512();
            transpose(pairs);
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512(out + (tile * n_steps + step) * 512 + i * 32, pairs[i]);
        }
        for (int64_t r = 0; r < 16; r++) {
            norms[tile * 16 + r][0] = sqrtf(_mm512_reduce_add_ps(whole[r]));
            norms[tile * 16 + r][1] = sqrtf(_mm512_reduce_add_ps(left[r])) + VANISHED;
        }
    }
}

static void multiply(const uint16_t *rows, int64_t n, int64_t n_steps, const uint16_t *packed, const float *half,
                     int64_t width, float *scores, float *least) {
    for (int64_t k = 0; k < width; k += 32) {
        const uint16_t *one = packed + (k / 16) * n_steps * 512, *two = one + n_steps * 512;
        for (int64_t r = 0; r < n; r += 32) {
            const uint16_t *left = rows + (r / 16) * n_steps * 512, *right = left + n_steps * 512;
            float *out = scores + k * STRIDE + r;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t step = 0; step < n_steps; step++) {
                _tile_loadd(4, one + step * 512, 64);
                _tile_loadd(6, left + step * 512, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, right + step * 512, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, two + step * 512, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, out, STRIDE * 4);
            _tile_stored(1, out + 16, STRIDE * 4);
            _tile_stored(2, out + 16 * STRIDE, STRIDE * 4);
            _tile_stored(3, out + 16 * STRIDE + 16, STRIDE * 4);
            for (int64_t j = 0; j < 32; j += FEW) {
                __m512 a = _mm512_set1_ps(INFINITY), b = a;
                for (int64_t i = j; i < j + FEW; i++) {
                    __m512 add = _mm512_set1_ps(half[k + i]);
                    a = _mm512_min_ps(a, _mm512_add_ps(_mm512_loadu_ps(out + i * STRIDE), add));
                    b = _mm512_min_ps(b, _mm512_add_ps(_mm512_loadu_ps(out + i * STRIDE + 16), add));
                }
                _mm512_storeu_ps(least + (k + j) / FEW * STRIDE + r, a);
                _mm512_storeu_ps(least + (k + j) / FEW * STRIDE + r + 16, b);
            }
        }
    }
}

/* As ss_scan, for scores[centroid][row] without `half`, of which the least of each FEW centroids is known. */
static void scan_strip(const float *scores, const float *least, int64_t n, int64_t width, int64_t base, const float *half,
                       const float *slack, Row *known) {
    for (int64_t p = 0; p < n; p += 16) {
        __m512 smallest = _mm512_loadu_ps(least + p);
        for (int64_t b = 1; b < width / FEW; b++) smallest = _mm512_min_ps(smallest, _mm512_loadu_ps(least + b * STRIDE + p));
        float limits[16], smallest_of[16];
        _mm512_storeu_ps(smallest_of, smallest);
        for (int64_t l = 0; l < 16; l++) {
            if (p + l < n) {
                float bound = smallest_of[l] + slack[p + l];
                if (base == 0 || bound < known[p + l].upper) known[p + l].upper = bound;
                limits[l] = known[p + l].upper + slack[p + l];
            } else
                limits[l] = -INFINITY;
        }
        __m512 limit = _mm512_loadu_ps(limits);
        for (int64_t b = 0; b < width / FEW; b++) {
            uint32_t hits = _mm512_cmp_ps_mask(_mm512_loadu_ps(least + b * STRIDE + p), limit, _CMP_LE_OQ);
            for (; hits; hits &= hits - 1) {
                int lane = __builtin_ctz(hits);
                for (int64_t k = b * FEW; k < b * FEW + FEW; k++) {
                    float score = scores[k * STRIDE + p + lane] + half[k];
                    if (score <= limits[lane]) add_candidate(known + p + lane, base + k, score - slack[p + lane]);
                }
            }
        }
    }
}
#endif

/* Bytes of `scratch` for `ss_search`. */
int64_t ss_scratch(int64_t padded) {
    return STRIP * padded * 2 + STRIP * (int64_t)sizeof(Row) + STRIP * 12 + (PANEL + PANEL / FEW) * STRIDE * 4 + 64;
}

/* -table in bfloat16, in tiles of 16 centroids x 32 columns; norms are |kept| and |left out|. */
void ss_pack(const float *table, int64_t n, int64_t dim, int64_t padded, uint16_t *packed, float *norms) {
#if TILES
    int64_t n_steps = padded / 32;
    for (int64_t k = 0; k < n; k++) {
        __m512 whole = _mm512_setzero_ps(), left = whole;
        for (int64_t step = 0; step < n_steps; step++) {
            __m512i kept = narrow(table + k * dim + step * 32, dim - step * 32, &whole, &left);
            kept = _mm512_xor_si512(kept, _mm512_set1_epi16((short)0x8000));
            _mm512_storeu_si512(packed + ((k / 16) * n_steps + step) * 512 + (k % 16) * 32, kept);
        }
        norms[2 * k] = sqrtf(_mm512_reduce_add_ps(whole));
        norms[2 * k + 1] = sqrtf(_mm512_reduce_add_ps(left)) + VANISHED;
    }
#endif
}

/* Codes of rows. `limits` has for each panel the largest |centroid| in bfloat16, |left out| and |half|; `half` is padded
 * with infinity to a multiple of 32. */
void ss_search(const float *rows, int64_t n, int64_t dim, int64_t padded, const float *table, int64_t n_centroids,
               const uint16_t *packed, const float *half, const double *exact_half, const float (*limits)[3],
               uint8_t *scratch, int32_t *codes) {
#if TILES
    struct { uint8_t palette, start, reserved[14]; uint16_t columns[16]; uint8_t lines[16]; } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) config.columns[t] = 64, config.lines[t] = 16;
    _tile_loadconfig(&config);
    scratch += 63 - ((uintptr_t)scratch + 63) % 64;
    uint16_t *halved = (uint16_t *)scratch;
    float *scores = (float *)(scratch + STRIP * padded * 2), *least = scores + PANEL * STRIDE;
    float *slack = least + PANEL / FEW * STRIDE, (*norms)[2] = (float (*)[2])(slack + STRIP);
    Row *known = (Row *)(norms + STRIP);
    int64_t wide = (n_centroids + 31) / 32 * 32;
    /* Rounding of a sum of `padded` products in float32, and what denormal numbers lose. */
    float share = (float)(padded + 16) * 0x1p-23f, least_slack = 0x1p-100f;
    for (int64_t begin = 0; begin < n; begin += STRIP) {
        int64_t here = n - begin < STRIP ? n - begin : STRIP;
        halve(rows + begin * dim, here, dim, padded / 32, halved, norms);
        for (int64_t r = 0; r < here; r++) known[r].count = 0;
        for (int64_t k = 0; k < wide; k += PANEL) {
            int64_t width = wide - k < PANEL ? wide - k : PANEL;
            const float *limit = limits[k / PANEL];
            for (int64_t r = 0; r < here; r++)
                slack[r] = 1.001f * (norms[r][1] * (limit[0] + limit[1]) + norms[r][0] * limit[1] +
                                     share * ((norms[r][0] + norms[r][1]) * limit[0] + limit[2])) + least_slack;
            multiply(halved, here, padded / 32, packed + k * padded, half + k, width, scores, least);
            scan_strip(scores, least, here, width, k, half + k, slack, known);
        }
        ss_settle(rows + begin * dim, here, dim, table, n_centroids, exact_half, known, codes + begin);
    }
    _tile_release();
#endif
}
