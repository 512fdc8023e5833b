/* Digests of many byte strings at once; the same bits as _digest.py, which is the definition.

   All strings are cut into rows of 4160 bytes, and twelve rows, of whichever strings, go through the keys
   together: a key is then fetched once for twelve rows, and twelve sums are under way at a time.
   Compiled for one instruction set (AVX-512 VNNI), asked for at run time. */

#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROW = 4160, COLUMNS = 16, TOGETHER = 12, CHUNK = 64, SUMS = COLUMNS * 4, MAX_THREADS = 64 };

typedef struct {
    const uint8_t *bytes;
    int64_t n_bytes, first_row, n_rows;
    int32_t *sums; /* (n_rows, 16) */
} Part;

typedef struct {
    const Part *parts;
    int64_t n_parts, from, to;
    const uint8_t *keys; /* (65 * 16, 16, 4): key + 64 of four neighbouring bytes for every column */
} Share;

int samestep_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni");
}

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))

/* sum += key x four bytes of memory, in every column. As an intrinsic, compilers copy the sums back and forth. */
#define ADD_PRODUCT(sum, key, bytes)                       \
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"                 \
            : "+v"(sum)                                    \
            : "v"(key), "m"(*(const uint8_t(*)[4])(bytes)))

/* Sums of twelve rows, of which only the first `length` bytes, a multiple of CHUNK, are not 0. */
VNNI static void multiply(const uint8_t *rows, int32_t *const *sums, const uint8_t *keys, int64_t length) {
    /* The product wants one side unsigned: keys are raised by 64, and 64 times the sum of a row is taken away. */
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum[TOGETHER], plain[TOGETHER];
#pragma GCC unroll 12
    for (int r = 0; r < TOGETHER; r++) sum[r] = plain[r] = _mm512_setzero_si512();
    for (int64_t at = 0; at < length; at += CHUNK) {
#pragma GCC unroll 12
        for (int r = 0; r < TOGETHER; r++) {
            _mm_prefetch((const char *)rows + at + (r + TOGETHER) * ROW, _MM_HINT_T1);
            plain[r] = _mm512_dpbusd_epi32(plain[r], ones, _mm512_loadu_si512(rows + at + r * ROW));
        }
        for (int64_t four = at; four < at + CHUNK; four += 4) {
            const __m512i key = _mm512_loadu_si512(keys + four * COLUMNS);
#pragma GCC unroll 12
            for (int r = 0; r < TOGETHER; r++) ADD_PRODUCT(sum[r], key, rows + four + r * ROW);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < TOGETHER; r++) {
        const __m512i raised = _mm512_set1_epi32(64 * _mm512_reduce_add_epi32(plain[r]));
        _mm512_storeu_si512(sums[r], _mm512_sub_epi32(sum[r], raised));
    }
}

static void *run(void *argument) {
    const Share *share = argument;
    uint8_t copied[TOGETHER * ROW]; /* rows of several parts, and last rows with their zeros */
    int32_t *sums[TOGETHER], unused[COLUMNS];
    int64_t p = 0, row = share->from, longest = 0;
    int n = 0;
    while (row < share->to) {
        while (row >= share->parts[p].first_row + share->parts[p].n_rows) p++;
        const Part *part = &share->parts[p];
        const int64_t inside = row - part->first_row, left = part->n_bytes - inside * ROW;
        const uint8_t *bytes = part->bytes + inside * ROW;
        if (n == 0 && left >= TOGETHER * ROW && share->to - row >= TOGETHER) {
            for (int r = 0; r < TOGETHER; r++) sums[r] = part->sums + (inside + r) * COLUMNS;
            multiply(bytes, sums, share->keys, ROW);
            row += TOGETHER;
            continue;
        }
        const int64_t length = left < 0 ? 0 : left < ROW ? left : ROW;
        if (length) memcpy(copied + n * ROW, bytes, length);
        memset(copied + n * ROW + length, 0, ROW - length);
        if (length > longest) longest = length;
        sums[n++] = part->sums + inside * COLUMNS;
        row++;
        if (n == TOGETHER || row == share->to) {
            while (n < TOGETHER) sums[n++] = unused;
            multiply(copied, sums, share->keys, (longest + CHUNK - 1) / CHUNK * CHUNK);
            n = longest = 0;
        }
    }
    return 0;
}

static void all_rows(const Part *parts, int64_t n_parts, const uint8_t *keys, int n_threads) {
    const int64_t n_rows = parts[n_parts - 1].first_row + parts[n_parts - 1].n_rows;
    if (n_threads > MAX_THREADS) n_threads = MAX_THREADS;
    if (n_rows < 1024 * (int64_t)n_threads) n_threads = 1; /* to start a thread costs as much as some MB */
    Share shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (int t = 0; t < n_threads; t++) {
        shares[t] = (Share){parts, n_parts, n_rows * t / n_threads, n_rows * (t + 1) / n_threads, keys};
        if (t) started[t] = pthread_create(&threads[t], 0, run, &shares[t]) == 0;
    }
    run(&shares[0]);
    for (int t = 1; t < n_threads; t++) {
        if (started[t]) pthread_join(threads[t], 0);
        else run(&shares[t]);
    }
}

static uint64_t mix(uint64_t word) {
    word *= 0x1E3779B97F4A7C15u;
    word = (word ^ (word >> 32)) * 0x3F58476D1CE4E5B9u;
    return word ^ (word >> 29 & 0x7FFFFFFFFu);
}

/* Arrange, in `parts`, the next level of what has more than one row; return how many parts that are. */
static int64_t next_level(Part *parts, int64_t n_parts, int32_t *room) {
    int64_t kept = 0, row = 0;
    for (int64_t p = 0; p < n_parts; p++) {
        const Part part = parts[p];
        if (part.n_rows == 1) continue;
        const int64_t n_bytes = part.n_rows * SUMS, n_rows = (n_bytes + ROW - 1) / ROW;
        parts[kept++] = (Part){(const uint8_t *)part.sums, n_bytes, row, n_rows, room + row * COLUMNS};
        row += n_rows;
    }
    return kept;
}

/* Digests (n, 2) of n byte strings; return 0, or 1 when there is no memory for it. */
int samestep_digests(int64_t n, const uint8_t *const *bytes, const int64_t *n_bytes, const int64_t *headers,
                     const uint8_t *keys, const int64_t *lanes, int64_t *digests, int n_threads) {
    if (n == 0) return 0;
    Part *parts = malloc(2 * n * sizeof(Part)), *all = parts + n;
    int32_t *levels[16] = {0};
    int64_t n_rows = 0, kept = n;
    int depth = 0, failed = parts == 0;
    for (int64_t p = 0; !failed && p < n; p++) {
        const int64_t rows = n_bytes[p] > 0 ? (n_bytes[p] + ROW - 1) / ROW : 1;
        parts[p] = (Part){bytes[p], n_bytes[p], n_rows, rows, 0};
        n_rows += rows;
    }
    failed = failed || (levels[0] = malloc(n_rows * SUMS)) == 0;
    for (int64_t p = 0; !failed && p < n; p++) {
        parts[p].sums = levels[0] + parts[p].first_row * COLUMNS;
        all[p] = parts[p];
    }
    const int32_t **last = failed ? 0 : malloc(n * sizeof *last);
    failed = failed || last == 0;
    while (!failed && kept) {
        all_rows(parts, kept, keys, n_threads);
        /* What has one row now is done; the others keep their order, so the p-th of them is found again. */
        int64_t rows = 0;
        for (int64_t p = 0, at = 0; p < n; p++) {
            if (all[p].n_rows == 0) continue;
            all[p] = parts[at++];
            last[p] = all[p].sums;
            if (all[p].n_rows == 1) all[p].n_rows = 0;
            else rows += (all[p].n_rows * SUMS + ROW - 1) / ROW;
        }
        if (rows) failed = (levels[++depth] = malloc(rows * SUMS)) == 0;
        if (!failed) kept = next_level(parts, kept, levels[depth]);
    }
    for (int64_t p = 0; !failed && p < n; p++) {
        for (int lane = 0; lane < 2; lane++) {
            uint64_t word = 0;
            for (int c = 0; c < COLUMNS; c++)
                word += mix((uint64_t)((int64_t)last[p][c] ^ lanes[lane * COLUMNS + c]));
            digests[2 * p + lane] = (int64_t)mix(word ^ (uint64_t)headers[2 * p + lane]);
        }
    }
    free(last);
    for (int level = 0; level < 16; level++) free(levels[level]);
    free(parts);
    return failed;
}
