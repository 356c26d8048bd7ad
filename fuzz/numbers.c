/* The C parser under sanitizers: libFuzzer's entry point, and for compilers without libFuzzer a loop of random damage.
   The text lies in memory of exactly its size and a NUL, the values in as many as readers/text.py gives: one read or
   write beyond either ends the process. Built and run by fuzz/numbers.sh. */

#include "../src/m2lgdg/data/readers/_numbers.c"

#include <stdio.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1 || memchr(data, 0, size)) return 0; /* read_table refuses a NUL byte */
    const char separators[] = {',', '\t', ' ', ';'};
    char separator = separators[data[0] % 4];
    size_t length = size - 1;
    char *text = malloc(length + 1);
    memcpy(text, data + 1, length);
    text[length] = '\0';
    long capacity = (long)(length / 2 + 1), columns = -1;
    float *out = malloc((size_t)capacity * sizeof *out);
    long count = read_numbers(text, separator, out, capacity, &columns);
    if (count > capacity || (count > 0 && (columns < 1 || count % columns))) abort();
    free(out);
    free(text);
    return 0;
}

#ifndef LIBFUZZER
static uint64_t state = 88172645463325252ULL;
static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

int main(int count, char **words) {
    long runs = count > 1 ? atol(words[1]) : 1000000;
    static const char *seeds[] = {",1.5,2e3\n-3,nan\n", "\t1\t2\n\t3\n", "  1 2 3\n4 5 6\n", " 1e22 1e-300\n0x1p3 inf\n",
                                  ",99999999999999999999,1e99999\r\n.5,5.\r\n", ",+1,-2\n+,-\n"};
    static const char alphabet[] = "0123456789.eE+-,; \t\r\n\v\fnaifNAIFx_\"#\xff\xa0";
    for (long run = 0; run < runs; run++) {
        uint8_t data[256];
        const char *seed = seeds[draw(6)];
        size_t size = strlen(seed);
        memcpy(data, seed, size);
        for (uint64_t change = draw(8) + 1; change; change--) {
            size_t at = draw(size);
            switch (draw(4)) {
            case 0: data[at] = (uint8_t)alphabet[draw(sizeof alphabet - 1)]; break;
            case 1: data[at] = (uint8_t)draw(256); break;
            case 2: size = at + 1; break;
            default:
                if (size < 200) {
                    size_t piece = draw(20) + 1 < size - at ? draw(20) + 1 : size - at;
                    if (piece > size - at) piece = size - at;
                    memmove(data + at + piece, data + at, size - at);
                    size += piece;
                }
            }
        }
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("{\"target\": \"numbers.c\", \"engine\": \"mutations\", \"runs\": %ld, \"broken\": 0}\n", runs);
    return 0;
}
#endif
