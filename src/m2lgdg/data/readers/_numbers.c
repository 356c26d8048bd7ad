/* Reads a rectangular text table of decimal numbers into float32, without Python's lock.
   Stands under readers/text.py, which loads it by ctypes and explains failures in words. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

static const double TEN[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                             1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/* One number. Up to 2^53 and 10^22 the quotient or product of two exact doubles is the correctly rounded value, so this
   equals strtod; anything longer, and words such as nan, go to strtod itself. Returns the end, or the start on failure. */
static const char *number(const char *at, double *value) {
    const char *start = at;
    int negative = *at == '-';
    if (*at == '-' || *at == '+') at++;
    uint64_t mantissa = 0;
    const char *first = at;
    while (*at >= '0' && *at <= '9') mantissa = mantissa * 10 + (uint64_t)(*at++ - '0');
    long digits = at - first, exponent = 0;
    if (*at == '.') {
        const char *point = ++at;
        while (*at >= '0' && *at <= '9') mantissa = mantissa * 10 + (uint64_t)(*at++ - '0');
        exponent = -(at - point);
        digits -= exponent;
    }
    if (digits > 0 && (*at == 'e' || *at == 'E')) {
        const char *mark = at++;
        int below = *at == '-';
        if (*at == '-' || *at == '+') at++;
        const char *power_start = at;
        long power = 0;
        while (*at >= '0' && *at <= '9' && power < 10000) power = power * 10 + (*at++ - '0');
        if (at == power_start) at = mark;
        else exponent += below ? -power : power;
    }
    if (start[0] == '\t' || start[0] == '\v' || start[0] == '\f') return start; /* strtod would skip it, and lines after it */
    if (digits == 0 || digits > 19 || mantissa > (1ULL << 53) || exponent < -22 || exponent > 22) {
        char *end;
        *value = strtod(start, &end);
        return end;
    }
    double magnitude = exponent < 0 ? (double)mantissa / TEN[-exponent] : (double)mantissa * TEN[exponent];
    *value = negative ? -magnitude : magnitude;
    return at;
}

/* Fills out (row, column) from text that ends in a NUL byte and returns the number of values, with *columns set from the
   first line. Returns -1 - line (from 0) where a line has another number of columns, a cell is no number, or out is full. */
long read_numbers(const char *text, char separator, float *out, long capacity, long *columns) {
    long count = 0, line = 0;
    *columns = 0;
    for (;;) {
        long cells = 0;
        for (;;) {
            while (*text == ' ' || *text == '\r' || (*text == '\t' && separator != '\t')) text++;
            if (*text == '\n' || *text == '\0') {
                if (cells) return -1 - line; /* the last cell is empty */
                break;
            }
            double value;
            const char *end = number(text, &value);
            if (end == text || count == capacity) return -1 - line;
            out[count++] = (float)value;
            cells++;
            text = end;
            while (*text == ' ' || *text == '\r' || (*text == '\t' && separator != '\t')) text++;
            if (*text == '\n' || *text == '\0') break;
            if (separator == ' ') {
                if (text == end) return -1 - line;
            } else if (*text++ != separator) return -1 - line;
        }
        if (cells) {
            if (*columns == 0) *columns = cells;
            if (cells != *columns) return -1 - line;
        }
        if (*text == '\0') return count;
        text++;
        line++;
    }
}
