#include "common/base/sort.h"

#include <stdbool.h>
#include <string.h>

typedef struct sort_job {
    char *base;
    size_t size;
    int (*compare)(const void *, const void *);
} sort_job;

static void swap(const sort_job *job, size_t a, size_t b) {
    char held[64], *x = job->base + a * job->size, *y = job->base + b * job->size;
    for (size_t left = job->size, part; left > 0; left -= part, x += part, y += part) {
        part = left < sizeof held ? left : sizeof held;
        memcpy(held, x, part);
        memcpy(x, y, part);
        memcpy(y, held, part);
    }
}

static int compare(const sort_job *job, size_t a, size_t b) {
    return job->compare(job->base + a * job->size, job->base + b * job->size);
}

static bool is_sorted(const sort_job *job, size_t count) {
    size_t i = 1;
    while (i < count && compare(job, i - 1, i) <= 0)
        i++;
    return i >= count;
}

/* The element at `root` goes down to where no child is greater. */
static void sift_down(const sort_job *job, size_t root, size_t count) {
    for (size_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && compare(job, child, child + 1) < 0)
            child++;
        if (compare(job, root, child) >= 0)
            return;
        swap(job, root, child);
    }
}

void mz_sort_in_place(void *base, size_t count, size_t size,
                      int (*compare_two)(const void *, const void *)) {
    const sort_job job = {base, size, compare_two};
    if (is_sorted(&job, count))
        return;
    for (size_t root = count / 2; root-- > 0;)
        sift_down(&job, root, count);
    for (size_t last = count - 1; last > 0; last--) {
        swap(&job, 0, last);
        sift_down(&job, 0, last);
    }
}
