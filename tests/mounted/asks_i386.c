/* Asks for the type of a file system by the system calls of 32-bit x86, which 64-bit programs have too.
 *
 * Prints a line for each call.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static long call(long number, long a, long b, long c, long d)
{
	long result;

	__asm__ volatile("int $0x80"
			 : "=a"(result)
			 : "a"(number), "b"(a), "c"(b), "d"(c), "S"(d)
			 : "memory", "r8", "r9", "r10", "r11");
	return (int)result;
}

int main(int count, char **words)
{
	char *low = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	unsigned int *fs = (unsigned int *)(low + 4096);
	long path = (long)low;
	int directory = open(words[1], O_RDONLY);
	int text = open("/sys/kernel/tracing/README", O_RDONLY);

	(void)count;
	strcpy(low, words[1]);
	printf("statfs %ld", call(99, path, (long)fs, 0, 0));
	printf(" %x %u %u %u %x\n", fs[0], fs[1], fs[9], fs[10], fs[11]);
	memset(fs, 0, 4096);
	printf("fstatfs %ld", call(100, directory, (long)fs, 0, 0));
	printf(" %x %u %u %u %x\n", fs[0], fs[1], fs[9], fs[10], fs[11]);
	memset(fs, 255, 4096);
	printf("statfs64 %ld", call(268, path, 84, (long)fs, 0));
	printf(" %x %u %u %u %x %x %x\n", fs[0], fs[1], fs[14], fs[15], fs[16], fs[20], fs[21]);
	memset(fs, 0, 4096);
	printf("fstatfs64 %ld", call(269, directory, 84, (long)fs, 0));
	printf(" %x %u %u %u %x %x %x\n", fs[0], fs[1], fs[14], fs[15], fs[16], fs[20], fs[21]);
	printf("size %ld\n", call(268, path, 88, (long)fs, 0));
	printf("sendfile %ld\n", call(187, 1, text, 0, 4096));
	printf("splice %ld\n", call(313, text, 0, 1, 0));
	printf("perf %ld\n", call(336, path, 0, -1, -1));
	return 0;
}
