#include "traces/base64.h"

#include <stdint.h>

/* Value of a character, or -1. */
static int digit(char c) {
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool mz_base64_decode(const char *text, size_t length, unsigned char *out, size_t *size) {
    uint32_t bits = 0;
    size_t n = 0;
    int held = 0;
    for (size_t whole = length; whole % 4 == 0 && length > 0 && whole - length < 2; length--)
        if (text[length - 1] != '=')
            break;
    for (size_t i = 0; i < length; i++) {
        int value = digit(text[i]);
        if (value < 0)
            return false;
        bits = bits << 6 | (uint32_t)value;
        held += 6;
        if (held >= 8) {
            held -= 8;
            out[n++] = (unsigned char)(bits >> held);
        }
    }
    *size = n;
    return held < 6 && (bits & ((1u << held) - 1)) == 0;
}
